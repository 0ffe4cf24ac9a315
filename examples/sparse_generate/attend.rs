//! Attention for a GQA model: dense, or over positions that its own queries and keys choose.

use anyhow::{ensure, Result};
use candle_core::{DType, Tensor, D};
use candle_nn::ops::softmax_last_dim;
use candle_topk::attention::{
    index_topk, indexer_scores, IndexKeys, KeyValues, SparseAttention, Visible,
};
use candle_topk::selection::{Bounds, Order, TopK};

use crate::model::Step;

/// How keys are scored, always by sums of ReLU(q . k) over heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scoring {
    /// A score for each query head: positions for each, three times as many gathers as by group in
    /// SmolLM2.
    Head,
    /// A score for each key head, summed over its group of query heads: positions for each group.
    Group,
    /// One score, summed over all heads: the same positions for all.
    Shared,
}

impl Scoring {
    pub fn name(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Group => "group",
            Self::Shared => "shared",
        }
    }
}

/// Sparse attention: K positions, of which some are not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sparse {
    /// K, forced positions included; whole blocks of them.
    pub k: usize,
    /// Positions are chosen by blocks of so many: 1, 64 or 128. The key of a block is the mean of its
    /// keys. The block that a token is in is always taken.
    pub block: usize,
    pub scoring: Scoring,
    /// The first so many positions of the sequence are always taken, rounded up to blocks.
    pub first: usize,
    /// And the last so many, the token's own included.
    pub last: usize,
    /// Whether the mean of the earlier keys is taken off the indexer's keys. It moves all scores of a
    /// head alike, which softmax doesn't see, but ReLU does: where a head's products are negative
    /// but for a few, it would leave nothing to tell the rest apart.
    pub center: bool,
    /// The first so many layers stay dense: their attention is flat.
    pub dense_layers: usize,
    /// Bytes for scores.
    pub budget: usize,
}

/// Dense causal attention, by Candle's products and softmax.
pub fn dense(step: &Step) -> Result<Tensor> {
    let (n, heads, dim) = step.q.dims3()?;
    let (length, kv_heads, _) = step.k.dims3()?;
    let group = heads / kv_heads;
    let q = step.q.reshape((n, kv_heads, group, dim))?;
    let q = q
        .permute((1, 2, 0, 3))?
        .reshape((kv_heads, group * n, dim))?;
    let k = step.k.permute((1, 2, 0))?.contiguous()?;
    let scores = (q.contiguous()?.matmul(&k)? * step.scale as f64)?.to_dtype(DType::F32)?;
    let device = step.q.device();
    let keys = Tensor::arange(0u32, length as u32, device)?.unsqueeze(0)?;
    let rows = Tensor::arange(step.first as u32, (step.first + n) as u32, device)?.unsqueeze(1)?;
    let seen = keys.broadcast_le(&rows)?;
    let shape = (kv_heads, group, n, length);
    let hidden = Tensor::full(f32::NEG_INFINITY, shape, device)?;
    let scores = seen
        .broadcast_as(shape)?
        .where_cond(&scores.reshape(shape)?, &hidden)?;
    let weights = softmax_last_dim(&scores)?.to_dtype(step.q.dtype())?;
    let v = step.v.transpose(0, 1)?.contiguous()?;
    let out = weights.reshape((kv_heads, group * n, length))?.matmul(&v)?;
    let out = out
        .reshape((kv_heads, group, n, dim))?
        .permute((2, 0, 1, 3))?;
    Ok(out.reshape((n, heads, dim))?)
}

/// The natural logarithm of the sum over all keys of exp(scaled score), F32 `[n, heads]`.
pub fn dense_lse(step: &Step) -> Result<Tensor> {
    const BLOCK: usize = 128;
    let (n, _, _) = step.q.dims3()?;
    let blocks = step.k.dims()[0].div_ceil(BLOCK);
    let all = Tensor::arange(0u32, blocks as u32, step.q.device())?;
    let all = all.unsqueeze(0)?.broadcast_as((n, blocks))?;
    let ends = (step.first..step.first + n).map(|position| position as u32 + 1);
    let ends = Tensor::new(ends.collect::<Vec<_>>(), step.q.device())?;
    let attention = SparseAttention::new(step.scale)
        .with_block_size(BLOCK)
        .with_visible(&Visible::between(None, Some(&ends)))
        .forward(step.q, &KeyValues::packed(step.k, step.v), &all)?;
    Ok(attention.lse)
}

impl Sparse {
    /// The output `[n, heads, dim]` and the lse F32 `[n, heads]`.
    pub fn run(&self, step: &Step) -> Result<(Tensor, Tensor)> {
        let (n, heads, dim) = step.q.dims3()?;
        let kv_heads = step.k.dims()[1];
        let rows = self.rows_of(step)?;
        let positions = self.positions(&rows, step)?;
        let visible = Visible::between(None, Some(&rows.ends(1, 0)?));
        let attention = SparseAttention::new(step.scale)
            .with_block_size(self.block)
            .with_visible(&visible)
            .forward(&rows.q, &KeyValues::packed(step.k, step.v), &positions)?;
        if rows.each == 1 {
            return Ok((attention.out, attention.lse));
        }
        // Back to the heads of a token side by side.
        let out = attention.out.reshape((n, rows.each, kv_heads, dim))?;
        let lse = attention.lse.reshape((n, rows.each, kv_heads))?;
        Ok((
            out.transpose(1, 2)?.reshape((n, heads, dim))?,
            lse.transpose(1, 2)?.reshape((n, heads))?,
        ))
    }

    /// The rows that choose together: tokens, or for positions of each head the heads of a group one
    /// behind the other, so that keys need not be repeated.
    fn rows_of(&self, step: &Step) -> Result<Rows> {
        let (n, heads, dim) = step.q.dims3()?;
        let kv_heads = step.k.dims()[1];
        let each = match self.scoring {
            Scoring::Head => heads / kv_heads,
            _ => 1,
        };
        let q = match each {
            1 => step.q.clone(),
            _ => step
                .q
                .reshape((n, kv_heads, each, dim))?
                .transpose(1, 2)?
                .reshape((n * each, kv_heads, dim))?,
        };
        Ok(Rows {
            q,
            each,
            first: step.first,
        })
    }

    /// First, last and all blocks that a token attends to.
    fn blocks(&self) -> (usize, usize, usize) {
        let last = match self.block {
            1 => self.last,
            block => self.last.div_ceil(block).max(1),
        };
        (self.first.div_ceil(self.block), last, self.k / self.block)
    }

    /// Whether forced positions leave any to choose.
    pub fn has_choice(&self) -> bool {
        let (first, last, all) = self.blocks();
        first + last < all
    }

    /// U32 `[rows, 1 or kv_heads, K / block]`.
    fn positions(&self, rows: &Rows, step: &Step) -> Result<Tensor> {
        ensure!(
            self.has_choice(),
            "{} first and {} last positions leave none of {} to choose, in blocks of {}",
            self.first,
            self.last,
            self.k,
            self.block
        );
        let chosen = match self.scoring {
            Scoring::Head | Scoring::Group => self.by_group(rows, step)?,
            Scoring::Shared => self.by_all(rows, step)?,
        };
        let Some(forced) = self.forced(rows)? else {
            return Ok(chosen);
        };
        let (n, lists, _) = chosen.dims3()?;
        let forced = forced.unsqueeze(1)?;
        let forced = forced.broadcast_as((n, lists, forced.dims()[2]))?;
        Ok(Tensor::cat(
            &[&forced.contiguous()?, &chosen.contiguous()?],
            2,
        )?)
    }

    /// The indexer's keys of a key head, `[T, dim]`, or of its whole blocks.
    fn keys(&self, step: &Step, head: usize) -> Result<IndexKeys> {
        let mut keys = step.k.narrow(1, head, 1)?.squeeze(1)?;
        let mean = self.mean(step, &keys)?;
        if self.block > 1 {
            let (length, dim) = keys.dims2()?;
            let blocks = length / self.block;
            let whole = keys.narrow(0, 0, blocks * self.block)?.contiguous()?;
            let whole = whole.reshape((blocks, self.block, dim))?;
            keys = whole.to_dtype(DType::F32)?.sum(1)?.to_dtype(keys.dtype())?;
            keys = (keys / self.block as f64)?;
        }
        Ok(IndexKeys::packed(&match mean {
            Some(mean) => keys.broadcast_sub(&mean)?,
            None => keys,
        }))
    }

    /// What is taken off the keys, `[1, dim]`.
    fn mean(&self, step: &Step, keys: &Tensor) -> Result<Option<Tensor>> {
        if !self.center {
            return Ok(None);
        }
        // Of what was there before this step, so that no token is chosen for by a later one; the first
        // step has only itself.
        let earlier = match step.first {
            0 => keys.clone(),
            first => keys.narrow(0, 0, first)?,
        };
        let mean = earlier.to_dtype(DType::F32)?.mean_keepdim(0)?;
        Ok(Some(mean.to_dtype(keys.dtype())?))
    }

    /// The first and the last blocks, U32 `[rows, first + last]`. What a token doesn't see is skipped
    /// in attention; a block that would come twice is none.
    fn forced(&self, rows: &Rows) -> Result<Option<Tensor>> {
        let (first, last, _) = self.blocks();
        if first + last == 0 {
            return Ok(None);
        }
        let count = rows.q.dims()[0];
        let mut data = Vec::with_capacity(count * (first + last));
        for row in 0..count {
            let end = rows.end(row).div_ceil(self.block);
            data.extend(0..first as u32);
            data.extend((1..=last).map(|back| match end.checked_sub(back) {
                Some(block) if block >= first => block as u32,
                _ => u32::MAX,
            }));
        }
        let shape = (count, first + last);
        Ok(Some(Tensor::from_vec(data, shape, rows.q.device())?))
    }

    /// The blocks that are left to choose from: all of them whole.
    fn choice(&self, rows: &Rows) -> Result<(Tensor, Tensor)> {
        let (first, last, _) = self.blocks();
        let starts = Tensor::full(first as u32, rows.q.dims()[0], rows.q.device())?;
        Ok((starts, rows.ends(self.block, last)?))
    }

    fn top(&self) -> Result<TopK> {
        let (first, last, all) = self.blocks();
        Ok(TopK::new(all - first - last)?.order(Order::ByPosition))
    }

    fn by_group(&self, rows: &Rows, step: &Step) -> Result<Tensor> {
        let (count, heads, _) = rows.q.dims3()?;
        let kv_heads = step.k.dims()[1];
        let group = heads / kv_heads;
        let weights = Tensor::ones((count, group), DType::F32, step.q.device())?;
        let (starts, ends) = self.choice(rows)?;
        let visible = Visible::between(Some(&starts), Some(&ends));
        let mut chosen = Vec::with_capacity(kv_heads);
        for head in 0..kv_heads {
            let q = rows.q.narrow(1, head * group, group)?;
            let (keys, top) = (self.keys(step, head)?, self.top()?);
            let one = index_topk(&q, &keys, &weights, &visible, &top, self.budget)?;
            chosen.push(one.positions);
        }
        Ok(Tensor::stack(&chosen, 1)?)
    }

    fn by_all(&self, rows: &Rows, step: &Step) -> Result<Tensor> {
        let (count, heads, _) = rows.q.dims3()?;
        let (length, kv_heads, _) = step.k.dims3()?;
        let group = heads / kv_heads;
        let (starts, ends) = self.choice(rows)?;
        let keys = (0..kv_heads).map(|head| self.keys(step, head));
        let keys = keys.collect::<Result<Vec<_>>>()?;
        // A sum and the scores of a head at a time.
        let each = (self.budget / (4 * length * 2)).clamp(1, count.max(1));
        let mut chosen = Vec::new();
        for first in (0..count).step_by(each) {
            let each = each.min(count - first);
            let part = |tensor: &Tensor| tensor.narrow(0, first, each);
            let (starts, ends) = (part(&starts)?, part(&ends)?);
            let visible = Visible::between(Some(&starts), Some(&ends));
            let weights = Tensor::ones((each, group), DType::F32, step.q.device())?;
            let mut scores: Option<Tensor> = None;
            for (head, keys) in keys.iter().enumerate() {
                let q = part(&rows.q)?.narrow(1, head * group, group)?;
                let own = indexer_scores(&q, keys, &weights, &visible)?;
                scores = Some(match scores {
                    None => own,
                    Some(sum) => (sum + own)?,
                });
            }
            let scores = scores.expect("a model has heads");
            let bounds = Bounds::new(&starts, &ends);
            chosen.push(self.top()?.select(&scores, &bounds)?.positions);
        }
        Ok(Tensor::cat(&chosen, 0)?.unsqueeze(1)?)
    }
}

/// Rows of queries, `each` of them for a token.
struct Rows {
    /// `[n each, heads, dim]`.
    q: Tensor,
    each: usize,
    /// The position of the first token.
    first: usize,
}

impl Rows {
    /// One past the last position that a row sees.
    fn end(&self, row: usize) -> usize {
        self.first + row / self.each + 1
    }

    /// The ends of all rows in blocks, less `last`.
    fn ends(&self, block: usize, last: usize) -> Result<Tensor> {
        let end = |row| self.end(row).div_ceil(block).saturating_sub(last) as u32;
        let ends: Vec<u32> = (0..self.q.dims()[0]).map(end).collect();
        Ok(Tensor::new(ends, self.q.device())?)
    }
}

/// The share of the attention's mass that lies on the positions attended to: its mean over tokens and
/// heads.
pub fn share(sparse_lse: &Tensor, dense_lse: &Tensor) -> Result<f64> {
    let share = (sparse_lse - dense_lse)?.exp()?;
    Ok(share.flatten_all()?.mean(D::Minus1)?.to_scalar::<f32>()? as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn step<'a>(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Step<'a> {
        Step {
            layer: 0,
            q,
            k,
            v,
            first: k.dims()[0] - q.dims()[0],
            scale: 0.25,
        }
    }

    fn operands(n: usize, length: usize) -> Result<[Tensor; 3]> {
        let random = |dims: [usize; 3]| Tensor::randn(0f32, 1.0, &dims, &Device::Cpu);
        Ok([
            random([n, 6, 16])?,
            random([length, 2, 16])?,
            random([length, 2, 16])?,
        ])
    }

    fn sparse(k: usize, scoring: Scoring, first: usize, last: usize) -> Sparse {
        Sparse {
            k,
            block: 1,
            scoring,
            first,
            last,
            center: k % 2 == 0,
            dense_layers: 0,
            budget: 5000,
        }
    }

    fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
        Ok((a - b)?.abs()?.max_all()?.to_scalar::<f32>()?)
    }

    #[test]
    fn all_positions_are_dense_attention() -> Result<()> {
        let [q, k, v] = operands(40, 100)?;
        let step = step(&q, &k, &v);
        for scoring in [Scoring::Head, Scoring::Group, Scoring::Shared] {
            for (first, last) in [(0, 0), (4, 0), (4, 16), (0, 99)] {
                let (out, lse) = sparse(100, scoring, first, last).run(&step)?;
                let what = format!("{scoring:?}, {first} first, {last} last");
                assert!(difference(&out, &dense(&step)?)? < 1e-5, "{what}");
                let share = share(&lse, &dense_lse(&step)?)?;
                assert!((share - 1.0).abs() < 1e-5, "{what}: {share}");
            }
        }
        Ok(())
    }

    #[test]
    fn positions_are_distinct_and_visible() -> Result<()> {
        for (n, length) in [(1, 1), (1, 60), (60, 60), (7, 50)] {
            let [q, k, v] = operands(n, length)?;
            let step = step(&q, &k, &v);
            for scoring in [Scoring::Head, Scoring::Group, Scoring::Shared] {
                for (first, last) in [(0, 0), (2, 5), (0, 8), (3, 0)] {
                    let sparse = sparse(16, scoring, first, last);
                    let rows = sparse.rows_of(&step)?;
                    let positions = sparse.positions(&rows, &step)?;
                    let (count, lists, _) = positions.dims3()?;
                    let all = positions.reshape((count * lists, 16))?.to_vec2::<u32>()?;
                    for (i, list) in all.iter().enumerate() {
                        let end = rows.end(i / lists);
                        let mut seen: Vec<u32> = list
                            .iter()
                            .copied()
                            .filter(|&p| (p as usize) < end)
                            .collect();
                        seen.sort_unstable();
                        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{list:?}");
                        assert_eq!(seen.len(), end.min(16), "{end}: {list:?}");
                        for p in (0..first.min(end)).chain(end.saturating_sub(last)..end) {
                            assert!(seen.contains(&(p as u32)), "{p} of {end}: {list:?}");
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_hold_the_token_and_whole_blocks_before_it() -> Result<()> {
        let [q, k, v] = operands(70, 330)?;
        let step = step(&q, &k, &v);
        for scoring in [Scoring::Head, Scoring::Group, Scoring::Shared] {
            for (first, last) in [(0, 0), (4, 0), (4, 100)] {
                let sparse = |k| Sparse {
                    block: 64,
                    ..sparse(k, scoring, first, last)
                };
                // Six blocks are all that there are.
                let (out, _) = sparse(6 * 64).run(&step)?;
                let what = format!("{scoring:?}, {first} first, {last} last");
                assert!(difference(&out, &dense(&step)?)? < 1e-5, "{what}");

                let few = sparse(4 * 64 + 17);
                let rows = few.rows_of(&step)?;
                let positions = few.positions(&rows, &step)?;
                let (count, lists, width) = positions.dims3()?;
                assert_eq!(width, 4);
                let all = positions
                    .reshape((count * lists, width))?
                    .to_vec2::<u32>()?;
                for (i, list) in all.iter().enumerate() {
                    let own = (rows.end(i / lists) - 1) / 64;
                    let mut list = list.clone();
                    list.sort_unstable();
                    assert!(
                        list.windows(2).all(|pair| pair[0] < pair[1]),
                        "{what}: {list:?}"
                    );
                    assert!(list.contains(&(own as u32)), "{what}: {list:?}");
                    assert!(first == 0 || list[0] == 0, "{what}: {list:?}");
                }
            }
        }
        assert!(Sparse {
            block: 64,
            ..sparse(64, Scoring::Group, 0, 0)
        }
        .run(&step)
        .is_err());
        Ok(())
    }

    #[test]
    fn more_positions_hold_more_of_the_mass() -> Result<()> {
        let [q, k, v] = operands(30, 200)?;
        let step = step(&q, &k, &v);
        let dense = dense_lse(&step)?;
        let mut before = 0.0;
        for k in [8, 16, 64, 128] {
            let (_, lse) = sparse(k, Scoring::Group, 0, 0).run(&step)?;
            let share = share(&lse, &dense)?;
            assert!(share > before && share < 1.0, "{k}: {share}");
            before = share;
        }
        assert!(sparse(8, Scoring::Group, 4, 4).run(&step).is_err());
        Ok(())
    }
}
