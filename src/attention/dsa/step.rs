//! The layer on a CUDA device: few launches, into memory that is new or kept.

use super::super::cuda::dsa as device;
pub(super) use super::super::cuda::dsa::refuse_capture;
use super::super::parts::{write_to, write_to_all, Held};
use super::super::{KeyValues, Positions, SparseAttention, Values, Visible, Workspace};
use super::cache::DsaCache;
use super::config::RopeLayout;
use super::weights::{Linear, EPS};
use super::{DsaAttention, Indexer, OP};
use candle_core::{DType, Device, Result, Tensor};

/// Rows of which the indexer's weights are one launch, and all products of a width are of one shape, whether
/// something is scored or not: what comes of a token does not depend on that.
pub(super) const FEW: usize = 256;

/// The memory of a step's intermediate results.
#[derive(Debug)]
pub(super) struct Memory {
    device: Device,
    /// What the steps before have used, by name and shape; `None`: nothing is kept.
    kept: Option<Vec<(&'static str, Tensor)>>,
}

impl Memory {
    /// New for every result.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            kept: None,
        }
    }

    /// At the addresses of the first step of as many rows.
    pub fn kept(device: &Device) -> Self {
        Self {
            device: device.clone(),
            kept: Some(Vec::new()),
        }
    }

    /// A tensor of which every element that is read is written before. One name is in use once at a time.
    fn take(&mut self, name: &'static str, dims: &[usize], dtype: DType) -> Result<Tensor> {
        let fits = |(own, tensor): &&(&'static str, Tensor)| {
            *own == name && tensor.dims() == dims && tensor.dtype() == dtype
        };
        if let Some((_, tensor)) = self.kept.iter().flatten().find(fits) {
            return Ok(tensor.clone());
        }
        // A graph would own what it allocates.
        if self.kept.is_some() {
            refuse_capture("DsaAttention::decode_into", &self.device)?;
        }
        // SAFETY: it is the caller's promise.
        let tensor = unsafe { Tensor::empty(dims, dtype, &self.device)? };
        if let Some(kept) = &mut self.kept {
            kept.push((name, tensor.clone()));
        }
        Ok(tensor)
    }
}

/// Which rows a step has.
pub(super) struct At<'a> {
    /// U32 `[rows]`: the position of each, and one more.
    pub ends: &'a Tensor,
    /// U32 `[rows]`: the sequence of each, where some have more rows than others.
    pub map: Option<&'a Tensor>,
    /// The first of the sequences, and how many there are.
    pub first: usize,
    pub sequences: usize,
    /// Positions that are looked at.
    pub longest: usize,
}

impl At<'_> {
    fn rows(&self) -> usize {
        self.ends.elem_count()
    }

    /// What a cache holds of these sequences.
    pub fn cached(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor
            .narrow(0, self.first, self.sequences)?
            .narrow(1, 0, self.longest)
    }

    pub fn visible(&self) -> Visible {
        Visible::between(None, Some(self.ends))
    }

    fn rows_of<'a>(
        &self,
        rope: [&'a Held; 2],
        ends: &'a Held,
        map: Option<&'a Held>,
        rotated: usize,
    ) -> device::Rows<'a, candle_core::CudaStorage> {
        device::Rows {
            ends: ends.part(),
            sequences: map.map(Held::part),
            cos: rope[0].part(),
            sin: rope[1].part(),
            count: self.rows(),
            first: self.first,
            each: self.rows() / self.sequences.max(1),
            rotated,
            eps: EPS as f32,
        }
    }
}

/// What scores are made of.
pub(super) struct Scored {
    /// `[rows, heads, dim]`.
    pub q: Tensor,
    /// F32 `[rows, heads]`.
    pub weights: Tensor,
}

impl Linear {
    /// `[rows, in]`, of dense rows, to `[rows, out]`.
    fn forward_into(&self, x: &Tensor, out: &Tensor) -> Result<()> {
        let (outputs, inputs) = self.weight.dims2()?;
        let of = device::Product {
            matrices: 1,
            rows: x.dims()[0],
            inputs,
            outputs,
            x: [inputs, 0],
            out: [outputs, 0],
            transposed: true,
        };
        product_into(of, x, &self.weight, self.bias.as_ref(), out)
    }
}

fn product_into(
    of: device::Product,
    x: &Tensor,
    matrices: &Tensor,
    bias: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    let (x, matrices, bias) = (Held::new(x), Held::new(matrices), bias.map(Held::new));
    let held: Vec<&Held> = [&x, &matrices].into_iter().chain(&bias).collect();
    Held::lock(&held);
    write_to(OP, out, &held, |mut out| {
        let bias = bias.as_ref().map(Held::part);
        device::product(of, x.part(), matrices.part(), bias, out.cuda())
    })
}

impl Indexer {
    fn fp8_of(&self) -> device::Fp8 {
        device::Fp8 {
            hadamard: self.fp8.hadamard.is_some(),
            power_of_two: self.fp8.power_of_two,
        }
    }

    fn interleaved(&self) -> bool {
        self.layout == RopeLayout::Interleaved
    }

    /// F32 `[rows, heads]`.
    fn weights_of(&self, x: &Tensor, memory: &mut Memory) -> Result<Tensor> {
        let rows = x.dims()[0];
        if rows > FEW {
            return self.weights.forward(&x.to_dtype(DType::F32)?);
        }
        let out = memory.take("weights", &[rows, self.heads], DType::F32)?;
        let (x, matrix) = (Held::new(x), Held::new(&self.weights.weight));
        let held = [&x, &matrix];
        Held::lock(&held);
        write_to(OP, &out, &held, |mut out| {
            device::weights(x.part(), matrix.part(), out.cuda())
        })?;
        Ok(out)
    }
}

impl DsaAttention {
    /// Queries `[rows, heads, latent + rotated]` for the cache, to which the rows' keys are added, and with
    /// `scoring` those of the indexer. `x` is `[rows, hidden]`, dense.
    pub(super) fn project(
        &self,
        x: &Tensor,
        cache: &DsaCache,
        at: &At,
        scoring: bool,
        memory: &mut Memory,
    ) -> Result<(Tensor, Option<Scored>)> {
        let (rows, dtype) = (at.rows(), x.dtype());
        let first = memory.take("first", &[rows, self.first.weight.dims()[0]], dtype)?;
        self.first.forward_into(x, &first)?;
        let latent = memory.take("latent", &[rows, self.rank], dtype)?;
        self.write_keys(&first, cache, at, &latent)?;

        let indexer = self.indexer.as_ref().filter(|_| scoring);
        let weights = match indexer {
            Some(indexer) => Some(indexer.weights_of(x, memory)?),
            None => None,
        };
        let own = self.heads * (self.nope + self.rotated);
        let part = match scoring || rows <= FEW {
            true => None,
            false => Some(self.second.outputs(0, own)?),
        };
        let second_by = part.as_ref().unwrap_or(&self.second);
        let width = second_by.weight.dims()[0];
        let second = memory.take("second", &[rows, width], dtype)?;
        second_by.forward_into(&latent, &second)?;

        let dims = [rows, self.heads, self.latent + self.rotated];
        let queries = memory.take("queries", &dims, dtype)?;
        let fp8 = cache.fp8();
        let q = match indexer {
            Some(indexer) => {
                let dims = [rows, indexer.heads, indexer.dim];
                let dtype = if fp8 { DType::F8E4M3 } else { dtype };
                Some(memory.take("index queries", &dims, dtype)?)
            }
            None => None,
        };
        self.turn_queries(
            &second,
            at,
            &queries,
            q.as_ref(),
            weights.as_ref().filter(|_| fp8),
        )?;
        let absorbed = device::Product {
            matrices: self.heads,
            rows,
            inputs: self.nope,
            outputs: self.latent,
            x: [width, self.nope + self.rotated],
            out: [self.heads * dims[2], dims[2]],
            transposed: false,
        };
        product_into(absorbed, &second, &self.to_latent, None, &queries)?;
        let scored = q.zip(weights).map(|(q, weights)| Scored { q, weights });
        Ok((queries, scored))
    }

    /// The rows' keys into the cache, and the queries' latent.
    fn write_keys(&self, first: &Tensor, cache: &DsaCache, at: &At, latent: &Tensor) -> Result<()> {
        let products = Held::new(first);
        let gains = [&self.q_a_norm.weight, &self.kv_a_norm.weight].map(Held::new);
        let norm = self.indexer.as_ref().map(|indexer| {
            let norm = &indexer.k_norm;
            (indexer, [Held::new(&norm.weight), Held::new(&norm.bias)])
        });
        let rope = [&self.rope.cos, &self.rope.sin].map(Held::new);
        let (ends, map) = (Held::new(at.ends), at.map.map(Held::new));
        let mut held = vec![&products, &ends, &gains[0], &gains[1], &rope[0], &rope[1]];
        held.extend(&map);
        if let Some((_, norm)) = &norm {
            held.extend(norm);
        }
        Held::lock(&held);
        let request = device::Keys {
            rows: at.rows_of([&rope[0], &rope[1]], &ends, map.as_ref(), self.rotated),
            products: products.part(),
            query_gain: gains[0].part(),
            latent_gain: gains[1].part(),
            rank: self.rank,
            latent: self.latent,
            index: norm
                .as_ref()
                .map(|(indexer, [gain, shift])| device::IndexKeys {
                    gain: gain.part(),
                    shift: shift.part(),
                    dim: indexer.dim,
                    interleaved: indexer.interleaved(),
                    fp8: indexer.fp8_of(),
                }),
        };
        let index_keys = cache.index_keys.as_ref();
        let scales = index_keys.and_then(|cached| cached.scales.as_ref());
        let outputs: Vec<&Tensor> = [latent, &cache.latent]
            .into_iter()
            .chain(index_keys.map(|cached| &cached.keys))
            .chain(scales)
            .collect();
        write_to_all(OP, &outputs, &held, |locked| {
            let mut caches = locked.iter_mut().zip(&outputs).map(|(output, tensor)| {
                let layout = tensor.layout();
                let storage = output.cuda();
                device::Cache { storage, layout }
            });
            let latent = caches.next().expect("it is the first").storage;
            let cache = caches.next().expect("it is the second");
            device::keys(&request, latent, cache, caches.next(), caches.next())
        })
    }

    /// RoPE of both kinds of queries. Of index queries in fp8 the scales go into the weights.
    fn turn_queries(
        &self,
        second: &Tensor,
        at: &At,
        queries: &Tensor,
        index_queries: Option<&Tensor>,
        weights: Option<&Tensor>,
    ) -> Result<()> {
        let products = Held::new(second);
        let rope = [&self.rope.cos, &self.rope.sin].map(Held::new);
        let (ends, map) = (Held::new(at.ends), at.map.map(Held::new));
        let mut held = vec![&products, &ends, &rope[0], &rope[1]];
        held.extend(&map);
        Held::lock(&held);
        let indexer = self.indexer.as_ref().filter(|_| index_queries.is_some());
        let request = device::Queries {
            rows: at.rows_of([&rope[0], &rope[1]], &ends, map.as_ref(), self.rotated),
            products: products.part(),
            heads: self.heads,
            nope: self.nope,
            latent: self.latent,
            index_heads: indexer.map_or(0, |indexer| indexer.heads),
            dim: indexer.map_or(0, |indexer| indexer.dim),
            interleaved: indexer.is_some_and(Indexer::interleaved),
            fp8: indexer.map_or_else(device::Fp8::default, Indexer::fp8_of),
        };
        let outputs: Vec<&Tensor> = [queries]
            .into_iter()
            .chain(index_queries)
            .chain(weights)
            .collect();
        write_to_all(OP, &outputs, &held, |locked| {
            let mut storages = locked.iter_mut().map(|output| output.cuda());
            let queries = storages.next().expect("it is the first");
            device::queries(&request, queries, storages.next(), storages.next())
        })
    }

    /// All positions below the ends, of rows that have no more than K.
    pub(super) fn everything_on_device(&self, ends: &Tensor) -> Result<Tensor> {
        let dims = [ends.elem_count(), self.topk];
        let positions = Memory::new(ends.device()).take("positions", &dims, DType::U32)?;
        let ends = Held::new(ends);
        Held::lock(&[&ends]);
        write_to(OP, &positions, &[&ends], |mut out| {
            device::everything(ends.part(), self.topk, out.cuda())
        })?;
        Ok(positions)
    }

    /// What the queries find at the positions, to hidden states `[rows, hidden]`: in a tensor of its own, or
    /// with a workspace in `out`.
    pub(super) fn attend(
        &self,
        queries: &Tensor,
        cache: &DsaCache,
        at: &At,
        positions: Positions,
        memory: &mut Memory,
        into: Option<(&Tensor, &mut Workspace)>,
    ) -> Result<Tensor> {
        let (rows, dtype) = (at.rows(), queries.dtype());
        let mut kv = KeyValues::batched(&at.cached(&cache.latent)?, Values::OfKeys(self.latent));
        if let Some(map) = at.map {
            kv = kv.with_row_sequences(map);
        }
        let attention = SparseAttention::new(self.scale).with_visible(&at.visible());
        let dims = [rows, self.heads, self.latent];
        let (attended, hidden) = match into {
            Some((out, workspace)) => {
                let attended = memory.take("attended", &dims, dtype)?;
                let lse = memory.take("lse", &dims[..2], DType::F32)?;
                attention.forward_into(queries, &kv, positions, [&attended, &lse], workspace)?;
                (attended, out.clone())
            }
            None => {
                let attended = attention.forward(queries, &kv, positions)?.out;
                let fresh = &mut Memory::new(queries.device());
                (attended, fresh.take("hidden", &[rows, self.hidden], dtype)?)
            }
        };
        let width = self.heads * self.value;
        let values = memory.take("values", &[rows, width], dtype)?;
        let of = device::Product {
            matrices: self.heads,
            rows,
            inputs: self.latent,
            outputs: self.value,
            x: [self.heads * self.latent, self.latent],
            out: [width, self.value],
            transposed: false,
        };
        product_into(of, &attended, &self.to_values, None, &values)?;
        self.o.forward_into(&values, &hidden)?;
        Ok(hidden)
    }
}

/// The ends of the rows of a step of `each` tokens a sequence, and lengths with these.
pub(super) fn advance(lengths: &Tensor, each: usize, most: usize, ends: &Tensor) -> Result<()> {
    write_to_all(OP, &[lengths, ends], &[], |locked| {
        let [lengths, ends] = locked else {
            unreachable!("there are two")
        };
        device::advance(lengths.cuda(), each, most, ends.cuda())
    })
}
