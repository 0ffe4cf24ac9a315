//! Decoding with lengths on the device, and as a CUDA graph.

use super::super::{index_topk_into, IndexBuffers, IndexKeys, Positions, Workspace};
use super::cache::DsaCache;
use super::step::{advance, refuse_capture, At, Memory, FEW};
use super::DsaAttention;
use crate::held::address;
use crate::selection::{Order, TopK};
use candle_core::{bail, DType, Device, Result, Tensor};

const OP: &str = "DsaAttention::decode_into";

/// What steps of decoding share, at fixed addresses on a CUDA device: the lengths of B sequences, of which
/// each gets n tokens a step, what the layers leave between their products, and the positions that the last
/// indexer chose.
///
/// One serves all layers of a model, one after the other: [`advance`](Self::advance) begins a step, then each
/// layer takes it ([`DsaAttention::decode_into`]). Neither allocates, uploads, reads back or
/// synchronises once a first step has loaded the kernels and made the memory, so a CUDA graph can hold a
/// step of all layers. [`DecodeGraph`] makes one of a layer.
///
/// ```no_run
/// # use candle_core::{DType, Device, Result, Tensor};
/// # use candle_topk::attention::dsa::{DecodeBuffers, DsaAttention, DsaCache};
/// # fn step(layers: &[DsaAttention], caches: &mut [DsaCache], x: &Tensor, out: &Tensor) -> Result<()> {
/// // 8 sequences of a token each a step, in the caches' sequences 0 to 7.
/// let mut buffers = DecodeBuffers::new(&layers[0], 8, 1, caches[0].capacity())?;
/// buffers.set_lengths(&caches[0].lengths()[..8])?;
/// // From here on: what can be captured.
/// buffers.advance()?;
/// for (layer, cache) in layers.iter().zip(caches) {
///     layer.decode_into(x, cache, 0, &mut buffers, out)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DecodeBuffers {
    sequences: usize,
    tokens: usize,
    most: usize,
    /// U32 `[B]`; from 2^31 up: the sequence rests.
    lengths: Tensor,
    /// U32 `[B n]`.
    ends: Tensor,
    index: IndexBuffers,
    workspace: Workspace,
    memory: Memory,
    /// Whether a layer has chosen positions.
    chosen: bool,
}

impl DecodeBuffers {
    /// For steps of `tokens` tokens of each of `sequences` sequences, none of which comes to more than `capacity`,
    /// through this layer and others of its model. All sequences rest until their lengths are set.
    ///
    /// # Errors
    /// For sizes of 0, more than 256 rows, on a device other than CUDA, where the device has no memory for it, and during a
    /// capture.
    pub fn new(
        layer: &DsaAttention,
        sequences: usize,
        tokens: usize,
        capacity: usize,
    ) -> Result<Self> {
        let device = layer.first.weight.device();
        if sequences == 0 || tokens == 0 || capacity == 0 || capacity > i32::MAX as usize {
            bail!("{OP}: buffers for {tokens} tokens of {sequences} sequences of up to {capacity} are asked for, at least 1 of each is needed and at most 2^31 - 1")
        }
        if !device.is_cuda() {
            bail!(
                "{OP}: the layer is on {:?}, a CUDA device is needed; forward serves others",
                device.location()
            )
        }
        let rows = sequences.saturating_mul(tokens);
        if rows > FEW {
            bail!("{OP}: a step of {tokens} tokens of {sequences} sequences is {rows} rows, at most {FEW} are supported; forward serves more")
        }
        Ok(Self {
            sequences,
            tokens,
            most: capacity,
            lengths: Tensor::from_vec(vec![u32::MAX; sequences], sequences, device)?,
            ends: Tensor::zeros(rows, DType::U32, device)?,
            index: IndexBuffers::new(rows, capacity, layer.topk, device)?,
            workspace: Workspace::new(device)?,
            memory: Memory::kept(device),
            chosen: false,
        })
    }

    fn device(&self) -> &Device {
        self.lengths.device()
    }

    /// Sets the lengths of all sequences: tokens that the caches hold.
    ///
    /// # Errors
    /// For another number of sequences, lengths above the capacity, and during a capture.
    pub fn set_lengths(&mut self, lengths: &[usize]) -> Result<()> {
        let most = lengths.iter().copied().max().unwrap_or(0);
        if lengths.len() != self.sequences || most > self.most {
            bail!(
                "{OP}: {} lengths of up to {most} are given, {} of up to {} are needed",
                lengths.len(),
                self.sequences,
                self.most
            )
        }
        refuse_capture(OP, self.device())?;
        let lengths: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
        let lengths = Tensor::from_vec(lengths, self.sequences, self.device())?;
        self.lengths.slice_set(&lengths, 0, 0)
    }

    /// Begins a step: every sequence is longer by its new tokens, of which the layers then see what is before each
    /// and itself. One launch. A sequence that would outgrow the capacity rests instead: its tokens get 0
    /// from the attention and enter no cache.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn advance(&mut self) -> Result<()> {
        self.chosen = false;
        advance(&self.lengths, self.tokens, self.most, &self.ends)
    }

    /// U32 `[B n, index_topk]`: a copy of the positions that the last indexer chose, in order, and behind them
    /// `u32::MAX`.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn positions(&self) -> Result<Tensor> {
        Ok(self.index.chosen().selection()?.positions)
    }
}

impl DsaAttention {
    /// [`forward`](Self::forward) of the step that [`DecodeBuffers::advance`] has begun, into a tensor of the caller:
    /// `x` and `out` are `[B n, hidden_size]`, dense, sequence by sequence, of sequences `first` to `first + B - 1`
    /// of the cache. The cache's own lengths are not looked at and stay as they are: set them with
    /// [`DsaCache::set_length`] where it is used otherwise too.
    ///
    /// The indexer scores whatever the lengths; of up to `index_topk` tokens all are chosen. A layer of
    /// [`IndexerType::Shared`](super::IndexerType::Shared) takes the positions that the last layer before it
    /// chose in this step. The output is bit for bit that of `forward` with the same products: of the same number
    /// of rows.
    ///
    /// # Errors
    /// As [`forward`](Self::forward) but for lengths; for buffers of another number of rows or another
    /// `index_topk`, with room for more tokens than the cache or the RoPE table; for an output of
    /// another shape, dtype or device or in the storage of an operand; and for the first step of a shape
    /// during a capture, as it makes the memory.
    pub fn decode_into(
        &self,
        x: &Tensor,
        cache: &mut DsaCache,
        first: usize,
        buffers: &mut DecodeBuffers,
        out: &Tensor,
    ) -> Result<()> {
        let rows = buffers.sequences * buffers.tokens;
        let dtype = self.first.weight.dtype();
        for (name, tensor) in [("the hidden states", x), ("the output", out)] {
            if tensor.dims() != [rows, self.hidden]
                || tensor.dtype() != dtype
                || !tensor.is_contiguous()
                || !tensor.device().same_device(buffers.device())
            {
                bail!(
                    "{OP}: {name} are {:?} {:?} on {:?} with strides {:?}, {dtype:?} [{rows}, {}] on the buffers' device is needed, dense",
                    tensor.dtype(),
                    tensor.dims(),
                    tensor.device().location(),
                    tensor.stride(),
                    self.hidden
                )
            }
        }
        if address(&x.storage_and_layout().0) == address(&out.storage_and_layout().0) {
            bail!("{OP}: the output lies in the storage of the hidden states, it needs one of its own")
        }
        if out.layout().start_offset() != 0 {
            bail!(
                "{OP}: the output begins at element {} of its storage, 0 is needed",
                out.layout().start_offset()
            )
        }
        self.check_cache(x, cache)?;
        let sequences = cache.lengths().len();
        if first
            .checked_add(buffers.sequences)
            .is_none_or(|past| past > sequences)
        {
            bail!(
                "{OP}: the step is of {} sequences from {first} on, the cache holds {sequences}",
                buffers.sequences
            )
        }
        let room = cache.capacity().min(self.rope.positions());
        if buffers.most > room {
            bail!(
                "{OP}: the buffers let sequences come to {} tokens, the cache and the RoPE table have room for {room}",
                buffers.most
            )
        }
        if buffers.index.chosen().k() != self.topk {
            bail!(
                "{OP}: the buffers are for an index_topk of {}, the layer's is {}",
                buffers.index.chosen().k(),
                self.topk
            )
        }
        if self.indexer.is_none() && !buffers.chosen {
            bail!("{OP}: the layer has no indexer and no layer before it has chosen positions in this step")
        }

        let DecodeBuffers {
            ends,
            index,
            workspace,
            memory,
            chosen,
            ..
        } = buffers;
        let at = At {
            ends,
            map: None,
            first,
            sequences: buffers.sequences,
            longest: buffers.most,
        };
        let (queries, scored) = self.project(x, cache, &at, true, memory)?;
        if let Some(scored) = scored {
            let held = cache.index_keys.as_ref().expect("the layer has an indexer");
            let mut keys = IndexKeys::batched(&at.cached(&held.keys)?);
            if let Some(scales) = &held.scales {
                keys = keys.with_scales(&at.cached(scales)?);
            }
            let top = TopK::new(self.topk)?.order(Order::ByPosition);
            let (q, weights) = (&scored.q, &scored.weights);
            index_topk_into(q, &keys, weights, &at.visible(), &top, index, workspace)?;
            *chosen = true;
        }
        let positions = Positions::Chosen(index.chosen());
        self.attend(
            &queries,
            cache,
            &at,
            positions,
            memory,
            Some((out, workspace)),
        )?;
        Ok(())
    }
}

/// Decoding by a layer as a CUDA graph: a step is a copy of the hidden states and one launch.
///
/// Steps give, bit for bit, what [`DsaAttention::forward`] gives, through the lengths at which the indexer begins to
/// choose. The graph counts the tokens on the device; only where the cache's lengths have been
/// changed otherwise in between (prefill, [`DsaCache::truncate`], [`DsaCache::reset`]) they are uploaded first.
///
/// ```no_run
/// # use candle_core::{Result, Tensor};
/// # use candle_topk::attention::dsa::{DecodeGraph, DsaAttention, DsaCache};
/// # fn decode(attention: &DsaAttention, mut cache: DsaCache, tokens: &[Tensor]) -> Result<()> {
/// // A token a step of sequence 0 of the cache, which holds the prompt.
/// let mut graph = DecodeGraph::new(attention, &mut cache, 0, 1, 1)?;
/// for token in tokens {
///     let hidden = graph.step(token, &mut cache)?; // [1, 1, hidden_size]
///     # let _ = hidden;
/// }
/// # Ok(())
/// # }
/// ```
pub struct DecodeGraph {
    first: usize,
    buffers: DecodeBuffers,
    /// `[B n, hidden_size]`.
    x: Tensor,
    hidden: Tensor,
    /// The lengths that the device counts with, where they are known.
    lengths: Option<Vec<usize>>,
    captured: Captured,
}

/// The graph, and what it holds the addresses of beside the buffers.
struct Captured {
    #[cfg(feature = "cuda")]
    graph: super::super::cuda::dsa::Graph,
    layer: DsaAttention,
    /// The cache's.
    latent: Tensor,
    index_keys: Option<[Option<Tensor>; 2]>,
}

impl std::fmt::Debug for DecodeGraph {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("DecodeGraph")
            .field("first", &self.first)
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}

const GRAPH: &str = "DecodeGraph";

/// The index keys and their scales.
fn index_keys_of(cache: &DsaCache) -> Option<[Option<Tensor>; 2]> {
    let cached = cache.index_keys.as_ref()?;
    Some([Some(cached.keys.clone()), cached.scales.clone()])
}

impl DecodeGraph {
    /// Captures a step of `tokens` tokens of each of `sequences` sequences from `first` on of this cache, which keeps
    /// what it holds.
    ///
    /// The device must have a stream of its own (`Device::new_cuda_with_stream`) and track no events
    /// (`CudaDevice::disable_event_tracking`, before any tensor is made), and nothing else may use its stream
    /// meanwhile.
    ///
    /// # Errors
    /// As [`DsaAttention::decode_into`]; for a layer without an indexer, whose positions are another's; on a device
    /// that a graph cannot be captured on, and without the feature `cuda`.
    pub fn new(
        layer: &DsaAttention,
        cache: &mut DsaCache,
        first: usize,
        sequences: usize,
        tokens: usize,
    ) -> Result<Self> {
        if layer.indexer.is_none() {
            bail!("{GRAPH}: the layer has no indexer, its positions are those of a layer before it; capture both with decode_into")
        }
        let capacity = cache.capacity().min(layer.rope.positions());
        let mut buffers = DecodeBuffers::new(layer, sequences, tokens, capacity)?;
        let weight = &layer.first.weight;
        let dims = (sequences * tokens, layer.hidden);
        let x = Tensor::zeros(dims, weight.dtype(), weight.device())?;
        let hidden = x.zeros_like()?;
        // All sequences rest: kernels are loaded and memory is made, and the cache stays as it is.
        let mut enqueue = |buffers: &mut DecodeBuffers| {
            buffers.advance()?;
            layer.decode_into(&x, cache, first, buffers, &hidden)
        };
        enqueue(&mut buffers)?;
        let captured = Captured {
            #[cfg(feature = "cuda")]
            graph: {
                weight.device().synchronize()?;
                let device = weight.device().as_cuda_device()?;
                super::super::cuda::dsa::capture(GRAPH, device, || enqueue(&mut buffers))?
            },
            layer: layer.clone(),
            latent: cache.latent.clone(),
            index_keys: index_keys_of(cache),
        };
        Ok(Self {
            first,
            buffers,
            x,
            hidden,
            lengths: None,
            captured,
        })
    }

    /// A step: `x` is `[B, n, hidden_size]`, and so is what comes of it, which lies where the next step's will:
    /// it is to be used, or copied, before that. The cache is the one of the capture, and holds the new
    /// tokens afterwards.
    ///
    /// # Errors
    /// As [`DsaAttention::forward`], and for another cache. The cache's lengths are then as before.
    pub fn step(&mut self, x: &Tensor, cache: &mut DsaCache) -> Result<Tensor> {
        let (sequences, tokens) = (self.buffers.sequences, self.buffers.tokens);
        let hidden = self.captured.layer.hidden;
        let dims = [sequences, tokens, hidden];
        if x.dims() != dims || x.dtype() != self.x.dtype() {
            bail!(
                "{GRAPH}: the hidden states are {:?} {:?}, {:?} {dims:?} is needed",
                x.dtype(),
                x.dims(),
                self.x.dtype()
            )
        }
        if !x.device().same_device(self.x.device()) {
            bail!(
                "{GRAPH}: the hidden states are on {:?} and the graph on {:?}, they must be on one device",
                x.device().location(),
                self.x.device().location()
            )
        }
        let ids = |keys: Option<[Option<Tensor>; 2]>| keys.map(|of| of.map(|t| t.map(|t| t.id())));
        if cache.latent.id() != self.captured.latent.id()
            || ids(index_keys_of(cache)) != ids(self.captured.index_keys.clone())
        {
            bail!("{GRAPH}: the cache is not the one that the graph was captured with")
        }
        let grown = cache.grown(GRAPH, self.first, &vec![tokens; sequences])?;
        let longest = grown.iter().copied().max().unwrap_or(0);
        if longest > self.buffers.most {
            bail!(
                "{GRAPH}: a sequence comes to {longest} tokens, the RoPE table has {} positions",
                self.buffers.most
            )
        }
        let lengths = &cache.lengths()[self.first..][..sequences];
        if self.lengths.as_deref() != Some(lengths) {
            self.lengths = None;
            self.buffers.set_lengths(lengths)?;
        }
        let rows = x.reshape((sequences * tokens, hidden))?.contiguous()?;
        self.x.slice_set(&rows, 0, 0)?;
        self.launch()?;
        cache.set_lengths(self.first, &grown);
        self.lengths = Some(grown);
        self.hidden.reshape(&dims)
    }

    #[cfg(feature = "cuda")]
    fn launch(&self) -> Result<()> {
        self.captured.graph.launch()
    }

    #[cfg(not(feature = "cuda"))]
    fn launch(&self) -> Result<()> {
        unreachable!("without the feature there is no graph")
    }

    /// U32 `[B n, index_topk]`: a copy of the positions that the tokens of the last step attended to, in order, and
    /// behind them `u32::MAX`: what a layer of [`IndexerType::Shared`](super::IndexerType::Shared) takes.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn positions(&self) -> Result<Tensor> {
        self.buffers.positions()
    }
}
