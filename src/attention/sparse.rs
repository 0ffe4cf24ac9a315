//! Attention over positions.

use super::buffers::Workspace;
use super::keys::{Bounded, Form, Located, Placement, Places, Visible};
use super::parts::{
    check_dense, check_device, check_f32, check_ints, check_size, merged_rows, rounded, shown,
    write_to_all, Backend, Held, Part,
};
use super::{cpu, cuda, no_metal};
use crate::buffer::Buffer;
use crate::selection::SelectionBuffers;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage, Result, Shape, Storage,
    Tensor,
};

const OP: &str = "sparse_attention";

/// The values that belong to keys.
#[derive(Debug, Clone)]
pub enum Values {
    /// A tensor of the keys' shape but for the last dimension.
    Tensor(Tensor),
    /// The first so many numbers of each key: multi-head latent attention, whose values are the
    /// latent part of its keys (512 of 576).
    OfKeys(usize),
}

impl From<&Tensor> for Values {
    fn from(tensor: &Tensor) -> Self {
        Self::Tensor(tensor.clone())
    }
}

/// Keys and values, and how they lie.
///
/// F32, F16 or BF16, of the dtype of the queries. The last dimension must be dense, the others may
/// have any stride.
#[derive(Debug, Clone)]
pub struct KeyValues {
    keys: Tensor,
    values: Values,
    placement: Placement,
}

impl KeyValues {
    /// `[T, Hkv, Dk]` and `[T, Hkv, Dv]`: one sequence, or several one behind the other. Positions
    /// are rows of these tensors.
    #[must_use]
    pub fn packed(keys: &Tensor, values: impl Into<Values>) -> Self {
        Self::new(keys, values.into(), Form::Packed)
    }

    /// `[B, T, Hkv, Dk]` and `[B, T, Hkv, Dv]`: a cache with room for T positions of each sequence.
    /// Positions are those in the sequence.
    #[must_use]
    pub fn batched(keys: &Tensor, values: impl Into<Values>) -> Self {
        Self::new(keys, values.into(), Form::Batched)
    }

    /// `[pages, page, Hkv, Dk]`, `[pages, page, Hkv, Dv]` and a block table, I32, I64 or U32
    /// `[B, blocks]`: the layout of candle-flash-attn's paged cache. Positions are those in the
    /// sequence. What an entry that names no page would hold is skipped.
    #[must_use]
    pub fn paged(keys: &Tensor, values: impl Into<Values>, block_table: &Tensor) -> Self {
        Self::new(keys, values.into(), Form::Paged(block_table.clone()))
    }

    fn new(keys: &Tensor, values: Values, form: Form) -> Self {
        Self {
            keys: keys.clone(),
            values,
            placement: Placement::new(form),
        }
    }

    /// The sequence of each row of queries, I32, I64 or U32 `[S]`. Without it the S rows are S / B
    /// for each sequence, in order. A row of no sequence attends to nothing.
    #[must_use]
    pub fn with_row_sequences(mut self, sequences: &Tensor) -> Self {
        self.placement.row_sequences = Some(sequences.clone());
        self
    }
}

/// The positions that rows attend to: a tensor, or what
/// [`index_topk_into`](super::index_topk_into) and [`TopK::select_into`](crate::selection::TopK)
/// have left in their buffers, of which the first S rows count.
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// U32 `[S, K]`, `[S, 1, K]` or `[S, Hkv, K]`.
    Tensor(&'a Tensor),
    /// `[S, K]`, read where they lie.
    Chosen(&'a SelectionBuffers),
}

impl<'a> From<&'a Tensor> for Positions<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl<'a> From<&'a SelectionBuffers> for Positions<'a> {
    fn from(chosen: &'a SelectionBuffers) -> Self {
        Self::Chosen(chosen)
    }
}

/// Positions, checked.
enum CheckedPositions<'a> {
    /// `[S, lists, K]`.
    Tensor(Tensor),
    Chosen(&'a SelectionBuffers),
}

/// Positions held for reading.
enum HeldPositions<'a> {
    Tensor(Held<'a>),
    Chosen(&'a SelectionBuffers),
}

impl CheckedPositions<'_> {
    fn hold(&self) -> HeldPositions<'_> {
        match self {
            Self::Tensor(tensor) => HeldPositions::Tensor(Held::new(tensor)),
            Self::Chosen(chosen) => HeldPositions::Chosen(chosen),
        }
    }
}

impl HeldPositions<'_> {
    fn lists<S: Backend>(&self) -> Lists<'_, S> {
        match self {
            Self::Tensor(held) => {
                let Part { storage, layout } = held.part();
                Lists {
                    source: Source::Storage(storage),
                    start: layout.start_offset(),
                    strides: std::array::from_fn(|i| layout.stride()[i]),
                }
            }
            Self::Chosen(chosen) => Lists {
                source: Source::Buffer(chosen.positions()),
                start: 0,
                strides: [chosen.k(), chosen.k(), 1],
            },
        }
    }
}

/// Lists of positions for a backend: where U32s lie, the first of them, and the strides of a row, of
/// a list and of an entry.
pub(crate) struct Lists<'a, S> {
    pub source: Source<'a, S>,
    pub start: usize,
    pub strides: [usize; 3],
}

pub(crate) enum Source<'a, S> {
    Storage(&'a S),
    Buffer(&'a Buffer<u32>),
}

/// What attention gives.
#[derive(Debug, Clone)]
pub struct Attention {
    /// `[S, Hq, Dv]`, of the dtype of the queries.
    pub out: Tensor,
    /// F32 `[S, Hq]`: the natural logarithm of the sum of the exponentials of the scaled scores,
    /// without the sink.
    pub lse: Tensor,
}

/// Attention of each row of queries over the positions given to it.
///
/// Queries are F32, F16 or BF16 `[S, Hq, Dk]` (or `[B, n, Hq, Dk]`, S = B n); Hq is a multiple of
/// Hkv, and the heads of a group are neighbours. Positions are U32 `[S, K]`, or `[S, 1, K]`, the
/// same for all heads, or `[S, Hkv, K]`, the same for a group; in any order. With a block size
/// above 1 a position p names the keys `[p x size, (p + 1) x size)`.
///
/// Skipped, and never read into the result whatever lies there: `u32::MAX` and every position at or
/// beyond the end of the keys; those outside what the row may see; entries at or beyond the row's
/// count; and keys on pages that do not exist. Positions of a row are distinct, as a selector's are:
/// one that comes twice counts twice, or with blocks of keys once or twice.
///
/// A row with nothing to attend to gives 0 and an lse of -inf. So does a row whose scores are all
/// -inf. Products, softmax and sums are f32; the output is rounded once. On CUDA the weights of the values
/// are rounded too, relative to a score near the greatest so far: of F16 to F16, of BF16 to two BF16 terms, or to
/// one where at least 64 keys share the weight, which is then off by up to 2^-8 of the values' mean size, and mostly
/// by far less.
/// Deterministic: a row is a function of its own queries, positions and keys.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::attention::{KeyValues, SparseAttention};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = &Device::Cpu;
/// let q = Tensor::new(&[[[1f32, 0.]]], device)?; // one token, one head
/// let k = Tensor::new(&[[[9f32, 9.]], [[0., 1.]], [[0., 2.]]], device)?; // three keys
/// let v = Tensor::new(&[[[7f32, 7.]], [[1., 3.]], [[3., 5.]]], device)?;
/// let positions = Tensor::new(&[[2u32, 1, u32::MAX]], device)?;
/// let attention = SparseAttention::new(1.0).forward(&q, &KeyValues::packed(&k, &v), &positions)?;
/// assert_eq!(attention.out.flatten_all()?.to_vec1::<f32>()?, [2., 4.]);
/// assert_eq!(attention.lse.to_vec2::<f32>()?, [[2f32.ln()]]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct SparseAttention {
    scale: f32,
    block: usize,
    sink: Option<Tensor>,
    counts: Option<Tensor>,
    visible: Visible,
}

impl SparseAttention {
    /// `scale` multiplies q . k before the softmax: Dk^-0.5, in most models.
    #[must_use]
    pub fn new(scale: f32) -> Self {
        Self {
            scale,
            block: 1,
            sink: None,
            counts: None,
            visible: Visible::all(),
        }
    }

    /// How many keys a position names: 1, the default, 64 or 128.
    #[must_use]
    pub fn with_block_size(mut self, size: usize) -> Self {
        self.block = size;
        self
    }

    /// A logit for each head, F32 `[Hq]`, that takes its share of the softmax and has no value:
    /// attention sink. It does not enter the lse.
    #[must_use]
    pub fn with_sink(mut self, sink: &Tensor) -> Self {
        self.sink = Some(sink.clone());
        self
    }

    /// How many positions of each row count, I32, I64 or U32 `[S]`: those behind are not looked at.
    #[must_use]
    pub fn with_counts(mut self, counts: &Tensor) -> Self {
        self.counts = Some(counts.clone());
        self
    }

    /// What each row may see of the keys its positions name: the causal bound.
    #[must_use]
    pub fn with_visible(mut self, visible: &Visible) -> Self {
        self.visible = visible.clone();
        self
    }

    /// Attends.
    ///
    /// # Errors
    /// For operands of a wrong rank, shape, dtype, layout or device, a block size other than 1, 64
    /// and 128, a scale that is not finite, and a device that is neither the CPU nor CUDA.
    pub fn forward<'a>(
        &self,
        q: &Tensor,
        kv: &KeyValues,
        positions: impl Into<Positions<'a>>,
    ) -> Result<Attention> {
        let checked = Checked::new(self, q, kv, positions.into(), true)?;
        let held = checked.hold();
        let dims = checked.dims;
        let (out, lse) = match held.q.storage() {
            Storage::Cpu(_) => {
                let (out, lse) = cpu::sparse_attention(&held.request())?;
                (
                    Storage::Cpu(rounded(checked.q.dtype(), out)),
                    Storage::Cpu(CpuStorage::F32(lse)),
                )
            }
            Storage::Cuda(_) => {
                let (out, lse) = cuda::sparse_attention(&held.request())?;
                (Storage::Cuda(out), Storage::Cuda(lse))
            }
            Storage::Metal(_) => return no_metal(OP),
        };
        let shape = (dims.rows, dims.heads, dims.value_dim);
        Ok(Attention {
            out: Tensor::from((out, Shape::from(shape))),
            lse: Tensor::from((lse, Shape::from((dims.rows, dims.heads)))),
        })
    }

    /// [`forward`](Self::forward) into two tensors, each in a storage of its own: the output, of the
    /// queries' dtype `[S, Hq, Dv]` with a dense last dimension, and the lse, F32 `[S, Hq]`.
    ///
    /// It allocates nothing, uploads nothing and reads nothing back where the bounds are
    /// [`Visible::all`] or [`Visible::between`].
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and for outputs of another shape, dtype or device, with
    /// elements that overlap, or in the storage of an operand or of each other.
    pub fn forward_into<'a>(
        &self,
        q: &Tensor,
        kv: &KeyValues,
        positions: impl Into<Positions<'a>>,
        [out, lse]: [&Tensor; 2],
        workspace: &mut Workspace,
    ) -> Result<()> {
        let checked = Checked::new(self, q, kv, positions.into(), false)?;
        workspace.check(OP, q)?;
        let dims = checked.dims;
        let shape = [dims.rows, dims.heads, dims.value_dim];
        if out.dtype() != checked.q.dtype() || out.dims() != shape {
            bail!(
                "{OP}: the output is {}, {:?} {shape:?} is needed",
                shown(out),
                checked.q.dtype()
            )
        }
        check_f32(OP, "lse", lse, &shape[..2])?;
        check_device(OP, q, "the output", out)?;
        check_device(OP, q, "lse", lse)?;
        check_dense(OP, "the output", out.layout())?;
        let held = checked.hold();
        write_to_all(OP, &[out, lse], &held.all(), |outputs| {
            let [to, lse_to] = outputs else {
                unreachable!("there are two")
            };
            match held.q.storage() {
                Storage::Cpu(_) => {
                    let (data, sums) = cpu::sparse_attention(&held.request())?;
                    cpu::store(rounded(checked.q.dtype(), data), to.cpu(), out.layout());
                    cpu::store(CpuStorage::F32(sums), lse_to.cpu(), lse.layout());
                    Ok(())
                }
                _ => cuda::sparse_attention_into(
                    &held.request(),
                    [(to.cuda(), out.layout()), (lse_to.cuda(), lse.layout())],
                    workspace,
                ),
            }
        })
    }

    /// The op over these positions, a `CustomOp3` of q, k and v in the packed form
    /// ([`KeyValues::packed`]); it gives the output alone.
    #[must_use]
    pub fn over(&self, positions: &Tensor) -> SparseAttentionOp {
        SparseAttentionOp {
            attention: self.clone(),
            positions: positions.clone(),
        }
    }
}

/// [`SparseAttention`] as a `CustomOp3` of q, k and v: see [`SparseAttention::over`].
#[derive(Debug, Clone)]
pub struct SparseAttentionOp {
    attention: SparseAttention,
    positions: Tensor,
}

/// Sizes of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dims {
    /// S.
    pub rows: usize,
    /// Hq.
    pub heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// Dk.
    pub key_dim: usize,
    /// Dv.
    pub value_dim: usize,
    /// K: entries of each list of positions.
    pub width: usize,
    /// Lists of positions a row: 1 or Hkv.
    pub lists: usize,
    /// Keys that a position names.
    pub block: usize,
}

/// The operands for a backend.
pub(crate) struct Attend<'a, S> {
    /// `[S, Hq, Dk]`.
    pub q: Part<'a, S>,
    pub keys: Part<'a, S>,
    /// `None`: the first Dv of each key.
    pub values: Option<Part<'a, S>>,
    /// `[S, lists, K]`.
    pub positions: Lists<'a, S>,
    pub sink: Option<Part<'a, S>>,
    pub counts: Option<Part<'a, S>>,
    pub located: Located<'a, S>,
    pub bounded: Bounded<'a, S>,
    pub dims: Dims,
    pub scale: f32,
}

/// The operands, checked.
struct Checked<'a> {
    attention: SparseAttention,
    q: Tensor,
    kv: KeyValues,
    positions: CheckedPositions<'a>,
    places: Places,
    starts: Option<Tensor>,
    ends: Option<Tensor>,
    dims: Dims,
}

/// A tensor's dtype and layout, of one that may be only a storage yet.
struct Shaped<'a>(DType, &'a Layout);

impl<'a> Shaped<'a> {
    fn of(tensor: &'a Tensor) -> Self {
        Self(tensor.dtype(), tensor.layout())
    }

    fn shown(&self) -> String {
        format!("{:?} {:?}", self.0, self.1.dims())
    }
}

/// The same of [`Values`].
enum ValueShape<'a> {
    Given(Shaped<'a>),
    OfKeys(usize),
}

/// Checks queries, keys and values against each other; the sizes but for those of the positions.
fn check_dims(q: Shaped, keys: Shaped, values: ValueShape, form: &Form) -> Result<Dims> {
    let &[rows, heads, key_dim] = q.1.dims() else {
        bail!(
            "{OP}: q is {}, [S, Hq, Dk] or [B, n, Hq, Dk] is needed",
            q.shown()
        )
    };
    if !matches!(q.0, DType::F32 | DType::F16 | DType::BF16) {
        bail!("{OP}: q is {}, F32, F16 or BF16 is needed", q.shown())
    }
    let wanted = match form {
        Form::Packed => "[T, Hkv, Dk]",
        Form::Batched => "[B, T, Hkv, Dk]",
        Form::Paged(_) => "[pages, page, Hkv, Dk]",
    };
    let rank = wanted.split(',').count();
    if keys.0 != q.0 || keys.1.dims().len() != rank || keys.1.dims()[rank - 1] != key_dim {
        bail!(
            "{OP}: the keys are {}, {:?} {wanted} is needed, with Dk = {key_dim} as in q",
            keys.shown(),
            q.0
        )
    }
    let kv_heads = keys.1.dims()[rank - 2];
    if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 || key_dim == 0 {
        bail!(
            "{OP}: q has {heads} heads of {key_dim} and the keys have {kv_heads}, a multiple is needed, and at least 1 of each"
        )
    }
    let value_dim = match values {
        ValueShape::Given(values) => {
            let leading = &keys.1.dims()[..rank - 1];
            if values.0 != q.0
                || values.1.dims().len() != rank
                || values.1.dims()[..rank - 1] != *leading
                || values.1.dims()[rank - 1] == 0
            {
                bail!(
                    "{OP}: the values are {}, {:?} of the keys' shape {:?} but for the last dimension are needed",
                    values.shown(),
                    q.0,
                    keys.1.dims()
                )
            }
            check_dense(OP, "the values", values.1)?;
            values.1.dims()[rank - 1]
        }
        ValueShape::OfKeys(first) => {
            if first == 0 || first > key_dim {
                bail!("{OP}: the values are the first {first} of each key, 1 to Dk = {key_dim} are accepted")
            }
            first
        }
    };
    check_dense(OP, "q", q.1)?;
    check_dense(OP, "the keys", keys.1)?;
    check_size(OP, "the output", &[rows, heads, value_dim])?;
    Ok(Dims {
        rows,
        heads,
        kv_heads,
        key_dim,
        value_dim,
        width: 0,
        lists: 1,
        block: 1,
    })
}

impl SparseAttention {
    /// Checks what does not depend on the keys, completes the sizes, and brings the positions into
    /// the form `[S, lists, K]`.
    fn check<'a>(
        &self,
        q: &Tensor,
        positions: Positions<'a>,
        dims: &mut Dims,
    ) -> Result<CheckedPositions<'a>> {
        if !self.scale.is_finite() {
            bail!(
                "{OP}: the scale is {}, a finite number is needed",
                self.scale
            )
        }
        if !matches!(self.block, 1 | 64 | 128) {
            bail!(
                "{OP}: the block size is {}, 1, 64 and 128 are accepted",
                self.block
            )
        }
        let positions = match positions {
            Positions::Tensor(tensor) => {
                check_device(OP, q, "positions", tensor)?;
                CheckedPositions::Tensor(check_lists(tensor, dims)?)
            }
            Positions::Chosen(chosen) => {
                if chosen.rows() < dims.rows {
                    bail!(
                        "{OP}: q has {} rows, the chosen positions are of {}, at least as many are needed",
                        dims.rows,
                        chosen.rows()
                    )
                }
                if !q.device().same_device(chosen.device()) {
                    bail!(
                        "{OP}: q is on {:?} and the chosen positions on {:?}, they must be on one device",
                        q.device().location(),
                        chosen.device().location()
                    )
                }
                dims.width = chosen.k();
                CheckedPositions::Chosen(chosen)
            }
        };
        dims.block = self.block;
        if let Some(sink) = &self.sink {
            check_f32(OP, "the sink", sink, &[dims.heads])?;
            check_device(OP, q, "the sink", sink)?;
        }
        if let Some(counts) = &self.counts {
            check_ints(OP, "counts", counts, &[dims.rows])?;
            check_device(OP, q, "counts", counts)?;
        }
        Ok(positions)
    }
}

/// Brings a tensor of positions into the form `[S, lists, K]`, and completes the sizes.
fn check_lists(tensor: &Tensor, dims: &mut Dims) -> Result<Tensor> {
    let positions = match tensor.rank() {
        2 => tensor.unsqueeze(1)?,
        _ => tensor.clone(),
    };
    match *positions.dims() {
        [rows, lists, width]
            if positions.dtype() == DType::U32
                && rows == dims.rows
                && (lists == 1 || lists == dims.kv_heads) =>
        {
            check_size(OP, "positions", positions.dims())?;
            dims.lists = lists;
            dims.width = width;
            Ok(positions)
        }
        _ => bail!(
            "{OP}: positions are {}, U32 [{}, K], [{}, 1, K] or [{}, {}, K] is needed",
            shown(tensor),
            dims.rows,
            dims.rows,
            dims.rows,
            dims.kv_heads
        ),
    }
}

impl<'a> Checked<'a> {
    fn new(
        attention: &SparseAttention,
        q: &Tensor,
        kv: &KeyValues,
        positions: Positions<'a>,
        allocates: bool,
    ) -> Result<Self> {
        let batch = (q.rank() == 4).then(|| q.dims()[0]);
        let q = match q.rank() {
            4 => merged_rows(OP, "q", q, allocates)?,
            _ => q.clone(),
        };
        let values = match &kv.values {
            Values::Tensor(values) => ValueShape::Given(Shaped::of(values)),
            Values::OfKeys(first) => ValueShape::OfKeys(*first),
        };
        let form = &kv.placement.form;
        let mut dims = check_dims(Shaped::of(&q), Shaped::of(&kv.keys), values, form)?;
        let positions = attention.check(&q, positions, &mut dims)?;
        check_device(OP, &q, "the keys", &kv.keys)?;
        if let Values::Tensor(values) = &kv.values {
            check_device(OP, &q, "the values", values)?;
        }
        let leading = &kv.keys.dims()[..kv.keys.rank() - 2];
        let places = kv.placement.places(OP, &q, dims.rows, leading)?;
        kv.placement
            .check_sequences(OP, &places, batch, &attention.visible)?;
        let bounds = attention.visible.bounds(dims.rows, q.device());
        let (starts, ends) = bounds.map_err(|e| e.context(OP))?;
        Ok(Self {
            attention: attention.clone(),
            q,
            kv: kv.clone(),
            positions,
            places,
            starts,
            ends,
            dims,
        })
    }

    fn hold(&self) -> HeldOperands<'_> {
        let held = HeldOperands {
            q: Held::new(&self.q),
            keys: Held::new(&self.kv.keys),
            values: match &self.kv.values {
                Values::Tensor(values) => Some(Held::new(values)),
                Values::OfKeys(_) => None,
            },
            tables: self.kv.placement.hold(),
            extras: Extras::hold(&self.attention, &self.positions, [&self.starts, &self.ends]),
            places: self.places,
            dims: self.dims,
        };
        Held::lock(&held.all());
        held
    }
}

/// What an attention reads beside queries, keys and values.
struct Extras<'a> {
    positions: HeldPositions<'a>,
    sink: Option<Held<'a>>,
    counts: Option<Held<'a>>,
    starts: Option<Held<'a>>,
    ends: Option<Held<'a>>,
    scale: f32,
}

impl<'a> Extras<'a> {
    fn hold(
        attention: &'a SparseAttention,
        positions: &'a CheckedPositions,
        [starts, ends]: [&'a Option<Tensor>; 2],
    ) -> Self {
        Self {
            positions: positions.hold(),
            sink: attention.sink.as_ref().map(Held::new),
            counts: attention.counts.as_ref().map(Held::new),
            starts: starts.as_ref().map(Held::new),
            ends: ends.as_ref().map(Held::new),
            scale: attention.scale,
        }
    }

    fn all(&self) -> Vec<&Held<'a>> {
        let positions = match &self.positions {
            HeldPositions::Tensor(held) => Some(held),
            HeldPositions::Chosen(_) => None,
        };
        let optional = [&self.sink, &self.counts, &self.starts, &self.ends];
        positions
            .into_iter()
            .chain(optional.into_iter().flatten())
            .collect()
    }

    fn request<'b, S: Backend>(
        &'b self,
        [q, keys]: [Part<'b, S>; 2],
        values: Option<Part<'b, S>>,
        located: Located<'b, S>,
        dims: Dims,
    ) -> Attend<'b, S> {
        Attend {
            q,
            keys,
            values,
            positions: self.positions.lists(),
            sink: self.sink.as_ref().map(Held::part),
            counts: self.counts.as_ref().map(Held::part),
            located,
            bounded: Bounded {
                starts: self.starts.as_ref().map(Held::part),
                ends: self.ends.as_ref().map(Held::part),
            },
            dims,
            scale: self.scale,
        }
    }
}

struct HeldOperands<'a> {
    q: Held<'a>,
    keys: Held<'a>,
    values: Option<Held<'a>>,
    tables: (Option<Held<'a>>, Option<Held<'a>>),
    extras: Extras<'a>,
    places: Places,
    dims: Dims,
}

impl<'a> HeldOperands<'a> {
    fn request<S: Backend>(&self) -> Attend<'_, S> {
        self.extras.request(
            [self.q.part(), self.keys.part()],
            self.values.as_ref().map(Held::part),
            Located::new(self.places, &self.tables),
            self.dims,
        )
    }

    fn all(&self) -> Vec<&Held<'a>> {
        let optional = [&self.values, &self.tables.0, &self.tables.1];
        [&self.q, &self.keys]
            .into_iter()
            .chain(optional.into_iter().flatten())
            .chain(self.extras.all())
            .collect()
    }
}

impl SparseAttentionOp {
    /// Runs `f` with the operands of a backend.
    fn with<'a, S: Backend, R>(
        &self,
        [q, k, v]: [(&'a S, &'a Layout); 3],
        f: impl FnOnce(&Attend<S>, Dims) -> Result<R>,
    ) -> Result<R> {
        let shaped = |(storage, layout): (&S, &'a Layout)| Shaped(storage.dtype(), layout);
        let mut dims = check_dims(
            shaped(q),
            shaped(k),
            ValueShape::Given(shaped(v)),
            &Form::Packed,
        )?;
        // Candle has seen that q, k and v are on one device; the positions stand for the queries.
        let given = Positions::Tensor(&self.positions);
        let positions = self.attention.check(&self.positions, given, &mut dims)?;
        let (own, other) = (q.0.device().location(), self.positions.device().location());
        if own != other {
            bail!("{OP}: q is on {own:?} and positions on {other:?}, they must be on one device")
        }
        let places = Placement::new(Form::Packed).places(
            OP,
            &self.positions,
            dims.rows,
            &k.1.dims()[..1],
        )?;
        let bounds = self
            .attention
            .visible
            .bounds(dims.rows, self.positions.device());
        let (starts, ends) = bounds.map_err(|e| e.context(OP))?;
        let extras = Extras::hold(&self.attention, &positions, [&starts, &ends]);
        Held::lock(&extras.all());
        let part = |(storage, layout)| Part { storage, layout };
        let tables = (None, None);
        let located = Located::new(places, &tables);
        let request = extras.request([part(q), part(k)], Some(part(v)), located, dims);
        f(&request, dims)
    }
}

impl CustomOp3 for SparseAttentionOp {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        self.with(operands, |request, dims| {
            let (out, _) = cpu::sparse_attention(request)?;
            let shape = Shape::from((dims.rows, dims.heads, dims.value_dim));
            Ok((rounded(q.dtype(), out), shape))
        })
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [(q, q_layout), (k, k_layout), (v, v_layout)];
        self.with(operands, |request, dims| {
            let (out, _) = cuda::sparse_attention(request)?;
            let shape = Shape::from((dims.rows, dims.heads, dims.value_dim));
            Ok((out, shape))
        })
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        no_metal(OP)
    }
}
