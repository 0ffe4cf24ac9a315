//! Indexer scores of real text in the form they are saved in: rotated queries and keys, of which
//! rows of scores are made where they are needed. A key is some hundred bytes, a row of 128K scores
//! half a megabyte.

#![allow(dead_code)] // The bench reads what the example writes.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{bail, DType, Device, Result, Tensor};

/// Queries F16 `[M, H, D]` of the last M positions of a text, keys F16 `[N, G, D]` of all of them (H / G
/// heads share a key), and the heads' weights F32 `[H]`.
pub struct Scores {
    pub queries: Tensor,
    pub keys: Tensor,
    pub weights: Tensor,
}

const NAMES: [&str; 3] = ["queries", "keys", "weights"];

impl Scores {
    pub fn new(queries: Tensor, keys: Tensor, weights: Tensor) -> Result<Self> {
        let (m, heads, d) = queries.dims3()?;
        let (n, groups, key_d) = keys.dims3()?;
        if d != key_d || groups == 0 || heads % groups != 0 || m > n {
            bail!(
                "scores: queries are {:?} and keys {:?}, accepted are [M, H, D] and [N, G, D] with M <= N and H a \
                 multiple of G",
                queries.shape(),
                keys.shape()
            )
        }
        if weights.dims() != [heads] {
            bail!(
                "scores: weights are {:?}, [{heads}] is accepted",
                weights.shape()
            )
        }
        Ok(Self {
            queries,
            keys,
            weights,
        })
    }

    /// How many rows there are, and how wide they are.
    pub fn dims(&self) -> Result<(usize, usize)> {
        Ok((self.queries.dim(0)?, self.keys.dim(0)?))
    }

    /// The valid length of a row: a query sees its own position and what is before it.
    pub fn length(&self, row: usize) -> Result<usize> {
        let (m, n) = self.dims()?;
        Ok(n - m + 1 + row)
    }

    pub fn save(&self, file: &Path) -> Result<()> {
        let tensors = [&self.queries, &self.keys, &self.weights];
        let named: HashMap<_, _> = NAMES.into_iter().zip(tensors.map(Tensor::clone)).collect();
        candle_core::safetensors::save(&named, file)
    }

    /// Onto the CPU, where rows are made: on a GPU Candle's kernels for it would be compiled first.
    pub fn load(file: &Path) -> Result<Self> {
        let mut tensors = candle_core::safetensors::load(file, &Device::Cpu)?;
        let [queries, keys, weights] = NAMES.map(|name| tensors.remove(name));
        match (queries, keys, weights) {
            (Some(queries), Some(keys), Some(weights)) => Self::new(queries, keys, weights),
            _ => bail!(
                "{} is no file of scores: it needs the tensors {NAMES:?}",
                file.display()
            ),
        }
    }

    /// Rows `first` and on, F32 `[count, N]` on the CPU: the sum over heads of w ReLU(q k), as in equation
    /// 1 of the HPC-Ops paper. What a row holds beyond its length is the score of a later position.
    pub fn rows(&self, first: usize, count: usize) -> Result<Tensor> {
        let (_, heads, d) = self.queries.dims3()?;
        let (n, groups, _) = self.keys.dims3()?;
        let weights = self.weights.to_vec1::<f32>()?;
        let queries = self.queries.narrow(0, first, count)?;
        let queries = queries.to_dtype(DType::F32)?;
        let mut sums = vec![0f32; count * n];
        let shared = heads / groups;
        for group in 0..groups {
            let keys = self.keys.narrow(1, group, 1)?.reshape((n, d))?;
            let keys = keys.to_dtype(DType::F32)?.t()?;
            for (head, &weight) in weights.iter().enumerate().skip(group * shared).take(shared) {
                let q = queries.narrow(1, head, 1)?.reshape((count, d))?;
                let products = q.contiguous()?.matmul(&keys)?.flatten_all()?;
                for (sum, product) in sums.iter_mut().zip(products.to_vec1::<f32>()?) {
                    *sum += weight * product.max(0.0);
                }
            }
        }
        Tensor::from_vec(sums, (count, n), &Device::Cpu)
    }
}
