//! Lightning-indexer scores, and positions chosen by them.

use super::buffers::{IndexBuffers, Workspace};
use super::keys::{Bounded, Form, Located, Placement, Places, Visible};
use super::parts::{
    check_dense, check_device, check_f32, check_size, merged_rows, shown, write_to, Backend, Held,
    Part,
};
use super::{cpu, cuda, no_metal};
use crate::empty::full;
use crate::selection::{Bounds, Selection, TopK};
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor};

const OP: &str = "indexer_scores";

/// The keys of an indexer, one a position and shared by all its heads, and how they lie.
///
/// F32, F16, BF16 or F8E4M3, of the dtype of the queries; D is the head dimension. The last
/// dimension must be dense, the others may have any stride.
#[derive(Debug, Clone)]
pub struct IndexKeys {
    keys: Tensor,
    scales: Option<Tensor>,
    placement: Placement,
}

impl IndexKeys {
    /// `[T, D]`: one sequence, or several one behind the other, which the bounds of the rows tell
    /// apart. Positions are rows of this tensor.
    #[must_use]
    pub fn packed(keys: &Tensor) -> Self {
        Self::new(keys, Form::Packed)
    }

    /// `[B, T, D]`: a cache with room for T positions of each sequence. Positions are those in the
    /// sequence.
    #[must_use]
    pub fn batched(keys: &Tensor) -> Self {
        Self::new(keys, Form::Batched)
    }

    /// `[pages, page, D]` and a block table, I32, I64 or U32 `[B, blocks]`, that names the pages of
    /// each sequence in order. Positions are those in the sequence, of which it can have
    /// blocks x page. An entry that names no page, such as -1, has no keys: it is never read, and
    /// scores -inf where it is visible.
    #[must_use]
    pub fn paged(keys: &Tensor, block_table: &Tensor) -> Self {
        Self::new(keys, Form::Paged(block_table.clone()))
    }

    fn new(keys: &Tensor, form: Form) -> Self {
        Self {
            keys: keys.clone(),
            scales: None,
            placement: Placement::new(form),
        }
    }

    /// A scale for each key, F32 of the shape of the keys without D: the key is then what is stored
    /// times its scale, which must not be negative. The scale of a query belongs into its weights.
    #[must_use]
    pub fn with_scales(mut self, scales: &Tensor) -> Self {
        self.scales = Some(scales.clone());
        self
    }

    /// The sequence of each row of queries, I32, I64 or U32 `[S]`. Without it the S rows are S / B
    /// for each sequence, in order. A row of no sequence sees nothing, and is to have an end of 0
    /// where positions are selected too: what is selected among is told by the bounds alone.
    #[must_use]
    pub fn with_row_sequences(mut self, sequences: &Tensor) -> Self {
        self.placement.row_sequences = Some(sequences.clone());
        self
    }
}

/// The operands of the scores, checked.
#[derive(Clone)]
pub(crate) struct Checked {
    pub q: Tensor,
    pub weights: Tensor,
    pub keys: IndexKeys,
    pub places: Places,
    pub starts: Option<Tensor>,
    pub ends: Option<Tensor>,
    pub rows: usize,
    pub heads: usize,
    pub dim: usize,
}

/// The same for a backend: scores of `rows` rows from `first` on.
pub(crate) struct Scores<'a, S> {
    pub q: Part<'a, S>,
    pub keys: Part<'a, S>,
    pub scales: Option<Part<'a, S>>,
    pub weights: Part<'a, S>,
    pub located: Located<'a, S>,
    pub bounded: Bounded<'a, S>,
    pub rows: usize,
    pub heads: usize,
    pub dim: usize,
}

/// Where scores are written: rows of `stride` elements from `start` on. What a row doesn't see is
/// left as it was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub start: usize,
    pub stride: usize,
}

impl Checked {
    pub fn new(
        op: &str,
        q: &Tensor,
        keys: &IndexKeys,
        weights: &Tensor,
        visible: &Visible,
        allocates: bool,
    ) -> Result<Self> {
        // [B, n, H, D] are B n rows.
        let batch = (q.rank() == 4).then(|| q.dims()[0]);
        let (q, weights) = match (q.rank(), weights.rank()) {
            (4, 3) if q.dims()[..3] == weights.dims()[..] => (
                merged_rows(op, "q", q, allocates)?,
                merged_rows(op, "weights", weights, allocates)?,
            ),
            _ => (q.clone(), weights.clone()),
        };
        let &[rows, heads, dim] = q.dims() else {
            bail!(
                "{op}: q is {}, [S, H, D] or [B, n, H, D] is needed, with weights [S, H] or [B, n, H]",
                shown(&q)
            )
        };
        if !matches!(
            q.dtype(),
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3
        ) {
            bail!(
                "{op}: q is {}, F32, F16, BF16 or F8E4M3 is needed",
                shown(&q)
            )
        }
        if heads == 0 || dim == 0 {
            bail!(
                "{op}: q is {}, at least 1 head and a dimension of at least 1 are needed",
                shown(&q)
            )
        }
        check_f32(op, "weights", &weights, &[rows, heads])?;
        let form = match keys.placement.form {
            Form::Packed => "[T, D]",
            Form::Batched => "[B, T, D]",
            Form::Paged(_) => "[pages, page, D]",
        };
        let rank = form.split(',').count();
        if keys.keys.rank() != rank
            || keys.keys.dims()[rank - 1] != dim
            || keys.keys.dtype() != q.dtype()
        {
            bail!(
                "{op}: the keys are {}, {:?} {form} is needed, with D = {dim} as in q",
                shown(&keys.keys),
                q.dtype()
            )
        }
        let leading = &keys.keys.dims()[..rank - 1];
        let places = keys.placement.places(op, &q, rows, leading)?;
        keys.placement
            .check_sequences(op, &places, batch, visible)?;
        if let Some(scales) = &keys.scales {
            check_f32(op, "the scales of the keys", scales, leading)?;
            check_device(op, &q, "the scales of the keys", scales)?;
        }
        check_device(op, &q, "the keys", &keys.keys)?;
        check_device(op, &q, "weights", &weights)?;
        check_dense(op, "q", q.layout())?;
        check_dense(op, "the keys", keys.keys.layout())?;
        let (starts, ends) = visible
            .bounds(rows, q.device())
            .map_err(|e| e.context(op.to_string()))?;
        Ok(Self {
            q,
            weights,
            keys: keys.clone(),
            places,
            starts,
            ends,
            rows,
            heads,
            dim,
        })
    }

    /// Rows `[first, first + rows)` alone.
    pub fn narrow(&self, first: usize, rows: usize) -> Result<Self> {
        if rows == self.rows {
            return Ok(self.clone());
        }
        let narrow = |tensor: &Option<Tensor>| {
            tensor
                .as_ref()
                .map(|tensor| tensor.narrow(0, first, rows))
                .transpose()
        };
        let mut keys = self.keys.clone();
        let map = &mut keys.placement.row_sequences;
        if map.is_none() && self.places.sequences > 1 {
            // A part of the rows no longer says which sequence they belong to.
            let each = self.places.rows_each;
            let of = (first..first + rows).map(|row| (row / each) as u32);
            *map = Some(Tensor::from_vec(
                of.collect::<Vec<_>>(),
                rows,
                self.q.device(),
            )?);
        } else {
            *map = narrow(map)?;
        }
        let mut places = self.places;
        if places.sequences == 1 {
            places.rows_each = rows;
        }
        Ok(Self {
            q: self.q.narrow(0, first, rows)?,
            weights: self.weights.narrow(0, first, rows)?,
            keys,
            places,
            starts: narrow(&self.starts)?,
            ends: narrow(&self.ends)?,
            rows,
            heads: self.heads,
            dim: self.dim,
        })
    }

    fn hold(&self) -> HeldScores<'_> {
        let held = HeldScores {
            checked: self,
            q: Held::new(&self.q),
            keys: Held::new(&self.keys.keys),
            scales: self.keys.scales.as_ref().map(Held::new),
            weights: Held::new(&self.weights),
            tables: self.keys.placement.hold(),
            starts: self.starts.as_ref().map(Held::new),
            ends: self.ends.as_ref().map(Held::new),
        };
        Held::lock(&held.all());
        held
    }
}

struct HeldScores<'a> {
    checked: &'a Checked,
    q: Held<'a>,
    keys: Held<'a>,
    scales: Option<Held<'a>>,
    weights: Held<'a>,
    tables: (Option<Held<'a>>, Option<Held<'a>>),
    starts: Option<Held<'a>>,
    ends: Option<Held<'a>>,
}

impl<'a> HeldScores<'a> {
    fn all(&self) -> Vec<&Held<'a>> {
        let optional = [
            self.scales.as_ref(),
            self.tables.0.as_ref(),
            self.tables.1.as_ref(),
            self.starts.as_ref(),
            self.ends.as_ref(),
        ];
        let given = [&self.q, &self.keys, &self.weights];
        given
            .into_iter()
            .chain(optional.into_iter().flatten())
            .collect()
    }

    fn request<S: Backend>(&self) -> Scores<'_, S> {
        Scores {
            q: self.q.part(),
            keys: self.keys.part(),
            scales: self.scales.as_ref().map(Held::part),
            weights: self.weights.part(),
            located: Located::new(self.checked.places, &self.tables),
            bounded: Bounded {
                starts: self.starts.as_ref().map(Held::part),
                ends: self.ends.as_ref().map(Held::part),
            },
            rows: self.checked.rows,
            heads: self.checked.heads,
            dim: self.checked.dim,
        }
    }
}

/// The scores of the lightning indexer (DeepSeek-V3.2, section 2.1): F32 `[S, T]`,
///
/// score\[s, t\] = sum over heads h of weights\[s, h\] x ReLU(q\[s, h\] . k\[t\])
///
/// for queries F32, F16, BF16 or F8E4M3 `[S, H, D]` (or `[B, n, H, D]`, S = B n), weights F32
/// `[S, H]` (or `[B, n, H]`) of any sign, and keys of the queries' dtype. T is what a sequence can
/// have. What a row doesn't see is -inf.
///
/// Sums are f32, and so are products, which tensor cores make of F16, BF16 and F8E4M3 (those of e4m3
/// add up to 14 bits of the greatest on devices of compute capability 9.0). Deterministic: on one device
/// a score is a function of its query, key and weights alone, and equal ones give equal scores. ReLU
/// makes exact zeros, and so ties; NaN goes through it.
///
/// On CUDA there are at most 128 heads of a dimension of at most 128. Queries and keys that lie at
/// multiples of 16 bytes, rows and offsets, are read fastest, and pages of a multiple of 8 keys, or 32
/// with scales.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::attention::{indexer_scores, IndexKeys, Visible};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = &Device::Cpu;
/// let q = Tensor::new(&[[[1f32, 0.], [0., 2.]]], device)?; // one token, two heads
/// let k = Tensor::new(&[[3f32, 1.], [-1., 1.], [5., 5.]], device)?; // three keys
/// let weights = Tensor::new(&[[1f32, -0.5]], device)?;
/// let ends = Tensor::new(&[2u32], device)?;
/// let visible = Visible::between(None, Some(&ends));
/// let scores = indexer_scores(&q, &IndexKeys::packed(&k), &weights, &visible)?;
/// assert_eq!(scores.to_vec2::<f32>()?, [[2., -1., f32::NEG_INFINITY]]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// For operands of a wrong rank, shape, dtype, layout or device.
pub fn indexer_scores(
    q: &Tensor,
    keys: &IndexKeys,
    weights: &Tensor,
    visible: &Visible,
) -> Result<Tensor> {
    scores(&Checked::new(OP, q, keys, weights, visible, true)?)
}

/// The scores of checked operands, `[S, T]`.
pub(crate) fn scores(checked: &Checked) -> Result<Tensor> {
    let shape = (checked.rows, checked.places.length);
    check_size(OP, "the scores", &[shape.0, shape.1])?;
    let held = checked.hold();
    let storage = match held.q.storage() {
        Storage::Cpu(_) => {
            let mut out = vec![f32::NEG_INFINITY; shape.0 * shape.1];
            let rows = Rows {
                start: 0,
                stride: shape.1,
            };
            cpu::indexer_scores(&held.request(), &mut out, rows)?;
            Storage::Cpu(CpuStorage::F32(out))
        }
        Storage::Cuda(_) => Storage::Cuda(cuda::indexer_scores(&held.request())?),
        Storage::Metal(_) => return no_metal(OP),
    };
    Ok(Tensor::from((storage, Shape::from(shape))))
}

/// [`indexer_scores`] into `out`, F32 `[S, T]` on the queries' device, whose last dimension is dense
/// and whose rows are disjoint. What a row doesn't see is left as it was: a selector that is given
/// the same bounds never reads it.
///
/// One launch and nothing else where the bounds are [`Visible::all`] or [`Visible::between`]: no
/// allocation, no upload, no readback and no synchronisation.
///
/// # Errors
/// As [`indexer_scores`], and for an output of another shape, dtype or device, with a strided last
/// dimension, with overlapping rows, or in the storage of an operand.
pub fn indexer_scores_into(
    q: &Tensor,
    keys: &IndexKeys,
    weights: &Tensor,
    visible: &Visible,
    out: &Tensor,
) -> Result<()> {
    scores_into(&Checked::new(OP, q, keys, weights, visible, false)?, out)
}

/// The scores of checked operands into rows of `out`.
pub(crate) fn scores_into(checked: &Checked, out: &Tensor) -> Result<()> {
    let dims = [checked.rows, checked.places.length];
    check_f32(OP, "the output", out, &dims)?;
    check_device(OP, &checked.q, "the output", out)?;
    check_dense(OP, "the output", out.layout())?;
    let stride = out.stride()[0];
    if checked.rows > 1 && stride < dims[1] {
        bail!(
            "{OP}: the rows of the output, of {} elements, lie {stride} apart and overlap, they must be disjoint",
            dims[1]
        )
    }
    let rows = Rows {
        start: out.layout().start_offset(),
        stride,
    };
    let held = checked.hold();
    write_to(OP, out, &held.all(), |mut out| match held.q.storage() {
        Storage::Cpu(_) => cpu::indexer_scores(&held.request(), out.f32(), rows),
        _ => cuda::indexer_scores_into(&held.request(), out.cuda(), rows),
    })
}

const TOPK: &str = "index_topk";

/// The positions of the K best [`indexer_scores`] of each row: U32 `[S, K]`, and how many each row
/// has, U32 `[S]`. K, and the order of the positions, are the selector's; see
/// [`selection`](crate::selection) for ties, NaN and the sentinel. A row that sees no more than K
/// keys takes them all. Positions are those of [`IndexKeys`].
///
/// Rows are scored and selected in chunks whose scores take at most `budget` bytes, so that the
/// `[S, T]` scores never exist whole; results do not depend on it.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::attention::{index_topk, IndexKeys, Visible};
/// use candle_topk::selection::{Order, TopK};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = &Device::Cpu;
/// // Two sequences in decoding, a new token each, in pages of two keys.
/// let q = Tensor::new(&[[[1f32, 0.]], [[0., 1.]]], device)?;
/// let weights = Tensor::ones((2, 1), candle_core::DType::F32, device)?;
/// let pages = Tensor::new(&[[[3f32, 0.], [1., 0.]], [[2., 9.], [0., 5.]], [[0., 7.], [4., 0.]]], device)?;
/// let table = Tensor::new(&[[0u32, 2], [1, u32::MAX]], device)?;
/// let lengths = Tensor::new(&[4u32, 1], device)?;
/// let top = TopK::new(2)?.order(Order::ByPosition);
/// let keys = IndexKeys::paged(&pages, &table);
/// let chosen = index_topk(&q, &keys, &weights, &Visible::decode(&lengths), &top, 1 << 20)?;
/// assert_eq!(chosen.positions.to_vec2::<u32>()?, [[0, 3], [0, u32::MAX]]);
/// assert_eq!(chosen.counts.to_vec1::<u32>()?, [2, 1]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`indexer_scores`] and [`TopK::select`], and for a budget below the scores of one row.
pub fn index_topk(
    q: &Tensor,
    keys: &IndexKeys,
    weights: &Tensor,
    visible: &Visible,
    top: &TopK,
    budget: usize,
) -> Result<Selection> {
    let checked = Checked::new(TOPK, q, keys, weights, visible, true)?;
    let (rows, width) = (checked.rows, checked.places.length);
    check_size(TOPK, "the positions", &[rows, top.k()])?;
    let device = checked.q.device();
    if rows == 0 || width == 0 {
        return Ok(Selection {
            positions: full(u32::MAX, (rows, top.k()), device)?,
            counts: Tensor::zeros(rows, DType::U32, device)?,
            values: top
                .has_values()
                .then(|| full(f32::NEG_INFINITY, (rows, top.k()), device))
                .transpose()?,
        });
    }
    let row = width * size_of::<f32>();
    let Some(chunks) = Chunks::new(rows, row, budget) else {
        bail!("{TOPK}: the budget is {budget} bytes, the scores of one row take {row}")
    };
    let mut chosen = Vec::with_capacity(2 + rows.div_ceil(chunks.each));
    let mut run = |first: usize, count: usize, scores: &Tensor| -> Result<()> {
        let part = checked.narrow(first, count)?;
        let scores = scores.narrow(0, 0, count)?;
        scores_into(&part, &scores)?;
        chosen.push(top.select(&scores, &selection_bounds(&part))?);
        Ok(())
    };
    if chunks.ahead > 0 {
        run(0, chunks.ahead, &unset(device, (chunks.ahead, width))?)?;
    }
    let scores = unset(device, (chunks.each, width))?;
    for first in (chunks.ahead..rows).step_by(chunks.each) {
        run(first, chunks.each.min(rows - first), &scores)?;
    }
    if let [_] = chosen[..] {
        return Ok(chosen.remove(0));
    }
    let joined = |part: fn(&Selection) -> Option<&Tensor>| -> Result<Option<Tensor>> {
        let parts: Option<Vec<_>> = chosen.iter().map(part).collect();
        parts.map(|parts| Tensor::cat(&parts, 0)).transpose()
    };
    Ok(Selection {
        positions: joined(|s| Some(&s.positions))?.expect("each part has positions"),
        counts: joined(|s| Some(&s.counts))?.expect("each part has counts"),
        values: joined(|s| s.values.as_ref())?,
    })
}

/// The rows that are scored and selected at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunks {
    /// Rows of a first chunk in memory of its own, or 0. A device takes almost a millisecond to map a GiB that it has
    /// given back since, and meanwhile has this chunk to work on.
    ahead: usize,
    /// Rows of the others.
    each: usize,
}

impl Chunks {
    /// What is mapped in less time than it pays to hide.
    const AT_ONCE: usize = 256 << 20;
    const AHEAD: usize = 96 << 20;
    /// Beyond it chunks are as good as whole, and it is mapped while the one ahead is at work.
    const MOST: usize = 384 << 20;

    /// For rows whose scores take `row` bytes; `None` where the budget has no room for one.
    fn new(rows: usize, row: usize, budget: usize) -> Option<Self> {
        let all = rows.saturating_mul(row);
        let mut ahead = 0;
        let mut most = budget / row;
        if all > Self::AT_ONCE && budget > Self::AT_ONCE && row <= Self::AHEAD {
            ahead = Self::AHEAD / row;
            most = (budget - Self::AHEAD).min(Self::MOST) / row;
        }
        if most == 0 {
            return None;
        }
        // Chunks of one size: a short last one would leave a device idle.
        let left = rows - ahead;
        let each = left.div_ceil(left.div_ceil(most));
        Some(Self { ahead, each })
    }
}

/// [`index_topk`] into buffers, all rows at once: the scores take the buffers' memory, and the
/// positions lie where [`SparseAttention::forward_into`](super::SparseAttention::forward_into)
/// reads them.
///
/// It allocates nothing, uploads nothing and reads nothing back where the bounds are
/// [`Visible::all`] or [`Visible::between`] (see [`Visible::bounds_into`]), so a CUDA graph can hold
/// it, with new lengths at every replay.
///
/// # Errors
/// As [`index_topk`], and for more rows or keys than the buffers hold, no keys at all, and buffers
/// of another K or device.
pub fn index_topk_into(
    q: &Tensor,
    keys: &IndexKeys,
    weights: &Tensor,
    visible: &Visible,
    top: &TopK,
    out: &mut IndexBuffers,
    workspace: &mut Workspace,
) -> Result<()> {
    let checked = Checked::new(TOPK, q, keys, weights, visible, false)?;
    let (rows, width) = (checked.rows, checked.places.length);
    workspace.check(TOPK, &checked.q)?;
    let (most, widest) = out.scores.dims2()?;
    if rows > most || width > widest || width == 0 {
        bail!("{TOPK}: there are {rows} rows of {width} keys, the buffers are for up to {most} rows of 1 to {widest}")
    }
    let scores = out.scores.narrow(0, 0, rows)?.narrow(1, 0, width)?;
    scores_into(&checked, &scores)?;
    let bounds = selection_bounds(&checked);
    top.select_into(&scores, &bounds, &mut out.chosen, &mut workspace.selection)
}

fn selection_bounds(checked: &Checked) -> Bounds<'_> {
    let bounds = match &checked.ends {
        Some(ends) => Bounds::ends(ends),
        None => Bounds::full(),
    };
    match &checked.starts {
        Some(starts) => bounds.with_start(starts),
        None => bounds,
    }
}

/// A tensor of f32 whose elements are written before they are read.
fn unset(device: &Device, shape: (usize, usize)) -> Result<Tensor> {
    if device.is_cpu() {
        return Tensor::zeros(shape, DType::F32, device);
    }
    // SAFETY: the scores of what a row sees are written, and the selector reads no others.
    unsafe { Tensor::empty(shape, DType::F32, device) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row is in one chunk, and what is held at a time is within the budget.
    #[test]
    fn chunks_cover_the_rows() {
        for rows in [1, 2, 7, 1000, 8192, 65_537, 1 << 20] {
            for width in [1, 100, 65_536, 430_000, 30_000_000, 200_000_000] {
                let row = 4 * width;
                for budget in [0, 1, 4096, 1 << 20, 256 << 20, 300 << 20, 1 << 30, 1 << 36] {
                    let Some(Chunks { ahead, each }) = Chunks::new(rows, row, budget) else {
                        assert!(budget < row);
                        continue;
                    };
                    assert!(budget >= row && each >= 1 && ahead < rows);
                    assert!((ahead + each) * row <= budget);
                    let mut starts = (ahead..rows).step_by(each);
                    let last = starts.next_back();
                    assert!(last.is_some_and(|last| last + each >= rows));
                }
            }
        }
        let of = |rows, budget| Chunks::new(rows, 4 << 16, budget).map(|c| (c.ahead, c.each));
        assert_eq!(of(8192, 1 << 30), Some((384, 1302)));
        assert_eq!(of(8192, 256 << 20), Some((0, 1024)));
        assert_eq!(of(1000, 1 << 30), Some((0, 1000)));
        assert_eq!(of(1, 1000), None);
    }
}
