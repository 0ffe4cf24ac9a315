//! What a layer needs beside the ops on a CUDA device: products into given memory, and its rows between them.

#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "dsa/no_cuda.rs"]
mod device;

pub(in super::super) use device::{
    advance, everything, keys, product, queries, refuse_capture, weights,
};
#[cfg(feature = "cuda")]
pub(in super::super) use device::{capture, preload, Graph};

use super::super::parts::Part;

/// Sizes and strides of a product of each of some matrices with its rows: `x` `[rows, inputs]` by a
/// matrix, to `[rows, outputs]`. In elements.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Product {
    pub matrices: usize,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// From a row of x to the next, and from the rows of one matrix to those of the next.
    pub x: [usize; 2],
    /// The same of the output.
    pub out: [usize; 2],
    /// Whether matrices lie as `[outputs, inputs]`, not `[inputs, outputs]`.
    pub transposed: bool,
}

/// A tensor `[B, C, ..]` of which a token of a sequence is written.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Cache<'a, 'b, S> {
    pub storage: &'a mut S,
    pub layout: &'b candle_core::Layout,
}

/// Which rows there are.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Rows<'a, S> {
    /// U32 `[rows]`: the position of each, and one more. 0: the row has no place.
    pub ends: Part<'a, S>,
    /// U32 `[rows]`: the sequence of each, counted from `first`.
    pub sequences: Option<Part<'a, S>>,
    /// F32 `[positions, rotated / 2]`.
    pub cos: Part<'a, S>,
    pub sin: Part<'a, S>,
    pub count: usize,
    pub first: usize,
    /// Rows of a sequence, where nothing says whose a row is.
    pub each: usize,
    pub rotated: usize,
    pub eps: f32,
}

/// How vectors become fp8.
#[derive(Debug, Clone, Copy, Default)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Fp8 {
    pub hadamard: bool,
    pub power_of_two: bool,
}

/// The index keys of new tokens.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct IndexKeys<'a, S> {
    /// Of the layer norm, F32 `[dim]` each.
    pub gain: Part<'a, S>,
    pub shift: Part<'a, S>,
    pub dim: usize,
    pub interleaved: bool,
    pub fp8: Fp8,
}

/// Norms and RoPE of new keys into the cache, and the norm of the queries' latent.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Keys<'a, S> {
    pub rows: Rows<'a, S>,
    /// `[rows, rank + latent + rotated + dim]`, the last of them where there is an indexer; dense.
    pub products: Part<'a, S>,
    /// Of the RMS norms, `[rank]` and `[latent]`.
    pub query_gain: Part<'a, S>,
    pub latent_gain: Part<'a, S>,
    pub rank: usize,
    pub latent: usize,
    pub index: Option<IndexKeys<'a, S>>,
}

/// RoPE of queries.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(in super::super) struct Queries<'a, S> {
    pub rows: Rows<'a, S>,
    /// `[rows, heads (nope + rotated) + index_heads dim]`, dense, or wider.
    pub products: Part<'a, S>,
    pub heads: usize,
    pub nope: usize,
    pub latent: usize,
    /// 0 where nothing is scored.
    pub index_heads: usize,
    pub dim: usize,
    pub interleaved: bool,
    pub fp8: Fp8,
}
