//! Where keys lie, and which of them a row of queries sees.

use super::parts::{
    check_dense, check_device, check_ints, check_size, shown, write_to_all, Backend, Held, Ints,
    Part,
};
use super::{cuda, no_metal};
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Storage, Tensor};

/// How the keys of several sequences lie.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    /// One behind the other: a position is a row of the tensor.
    Packed,
    /// Each in a stretch of its own.
    Batched,
    /// In pages that a table names.
    Paged(Tensor),
}

/// The form of a cache, and the sequences that its rows of queries belong to.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    pub form: Form,
    pub row_sequences: Option<Tensor>,
}

/// What a placement comes to for a tensor of keys: plain numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    /// Sequences; 1 where they are packed.
    pub sequences: usize,
    /// Positions that a sequence can have.
    pub length: usize,
    /// Positions of a page; 0 without a block table.
    pub page: usize,
    /// Whether keys have no dimension of sequences or pages.
    pub packed: bool,
    /// Pages there are.
    pub pages: usize,
    /// Rows of queries for each sequence, where nothing says which is whose.
    pub rows_each: usize,
}

impl Places {
    /// The strides of a sequence or page and of a position, of a tensor with such dimensions.
    pub fn strides(&self, strides: &[usize]) -> [usize; 2] {
        match *strides {
            [token, ..] if self.packed => [0, token],
            [outer, token, ..] => [outer, token],
            _ => unreachable!("the rank is checked before"),
        }
    }
}

impl Placement {
    pub fn new(form: Form) -> Self {
        Self {
            form,
            row_sequences: None,
        }
    }

    /// Refuses queries, or lengths for decoding, of another number of sequences than the keys have,
    /// where nothing else says which row is whose. `batch` is the B of queries `[B, n, ..]`.
    pub fn check_sequences(
        &self,
        op: &str,
        places: &Places,
        batch: Option<usize>,
        visible: &Visible,
    ) -> Result<()> {
        if self.row_sequences.is_some() || matches!(self.form, Form::Packed) {
            return Ok(());
        }
        let lengths = match &visible.0 {
            Rule::Decode { lengths } => lengths.dims().first().copied(),
            _ => None,
        };
        for (name, count) in [("q", batch), ("lengths", lengths)] {
            if let Some(count) = count.filter(|&count| count != places.sequences) {
                bail!(
                    "{op}: {name} is for {count} sequences and the keys are of {}, as many are needed, or with_row_sequences",
                    places.sequences
                )
            }
        }
        Ok(())
    }

    /// Checks the leading dimensions of the keys, which come without what a key holds, and the
    /// tables.
    pub fn places(&self, op: &str, q: &Tensor, rows: usize, leading: &[usize]) -> Result<Places> {
        let mut places = match (&self.form, leading) {
            (Form::Packed, &[length]) => Places {
                sequences: 1,
                length,
                page: 0,
                packed: true,
                pages: 0,
                rows_each: rows,
            },
            (Form::Batched, &[sequences, length]) => Places {
                sequences,
                length,
                page: 0,
                packed: false,
                pages: 0,
                rows_each: 0,
            },
            (Form::Paged(table), &[pages, page]) => {
                check_device(op, q, "the block table", table)?;
                let &[sequences, blocks] = table.dims() else {
                    bail!(
                        "{op}: the block table is {}, [B, blocks] is needed",
                        shown(table)
                    )
                };
                check_ints(op, "the block table", table, &[sequences, blocks])?;
                if page == 0 {
                    bail!("{op}: the pages hold 0 positions, at least 1 is needed")
                }
                Places {
                    sequences,
                    length: blocks.saturating_mul(page),
                    page,
                    packed: false,
                    pages,
                    rows_each: 0,
                }
            }
            _ => unreachable!("the rank is checked before"),
        };
        // Positions are u32 whose greatest value means none.
        if places.length >= u32::MAX as usize {
            bail!(
                "{op}: a sequence has {} positions, at most 2^32 - 2 are supported",
                places.length
            )
        }
        match &self.row_sequences {
            Some(map) => {
                check_device(op, q, "the sequences of the rows", map)?;
                check_ints(op, "the sequences of the rows", map, &[rows])?;
            }
            None if matches!(self.form, Form::Packed) => (),
            None if rows.is_multiple_of(places.sequences) => {
                places.rows_each = rows / places.sequences.max(1)
            }
            None => bail!(
                "{op}: q has {rows} rows for {} sequences, a multiple is needed, or with_row_sequences",
                places.sequences
            ),
        }
        Ok(places)
    }

    pub fn hold(&self) -> (Option<Held<'_>>, Option<Held<'_>>) {
        let table = match &self.form {
            Form::Paged(table) => Some(Held::new(table)),
            _ => None,
        };
        (table, self.row_sequences.as_ref().map(Held::new))
    }
}

/// [`Places`] with its tables, for a backend.
pub(crate) struct Located<'a, S> {
    pub places: Places,
    pub table: Option<Part<'a, S>>,
    pub row_sequences: Option<Part<'a, S>>,
}

impl<'a, S: Backend> Located<'a, S> {
    pub fn new(places: Places, held: &'a (Option<Held>, Option<Held>)) -> Self {
        Self {
            places,
            table: held.0.as_ref().map(Held::part),
            row_sequences: held.1.as_ref().map(Held::part),
        }
    }
}

/// On the CPU: from a row and a position to where the key lies.
pub(crate) struct Locator<'a> {
    places: Places,
    table: Option<Ints<'a>>,
    row_sequences: Option<Ints<'a>>,
}

impl<'a> Locator<'a> {
    pub fn new(located: &Located<'a, CpuStorage>) -> Result<Self> {
        let ints = |part: &Option<Part<'a, CpuStorage>>| part.as_ref().map(Ints::new).transpose();
        Ok(Self {
            places: located.places,
            table: ints(&located.table)?,
            row_sequences: ints(&located.row_sequences)?,
        })
    }

    /// The sequence of a row of queries; `None` where the map names none.
    pub fn sequence(&self, row: usize) -> Option<usize> {
        let Some(map) = &self.row_sequences else {
            return Some(row / self.places.rows_each);
        };
        usize::try_from(map.get(row, 0))
            .ok()
            .filter(|&s| s < self.places.sequences)
    }

    /// The first element of the key at a position below the sequence's length; `None` on a page
    /// that does not exist.
    pub fn at(
        &self,
        sequence: usize,
        position: usize,
        [outer, token]: [usize; 2],
    ) -> Option<usize> {
        let Some(table) = &self.table else {
            return Some(sequence * outer + position * token);
        };
        let page = self.places.page;
        let block = usize::try_from(table.get(sequence, position / page))
            .ok()
            .filter(|&block| block < self.places.pages)?;
        Some(block * outer + position % page * token)
    }
}

/// The keys that each row of queries may see, as positions `[start, end)`.
///
/// Bounds are read where they lie, on the device, and clamped to the positions that a sequence can
/// have; an end at or below the start, and a negative length, make a row that sees nothing. They are
/// I32, I64 or U32, where a U32 from 2^31 up is read as negative.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::attention::Visible;
///
/// # fn main() -> candle_core::Result<()> {
/// // Two sequences in one prefill: 2 new tokens after 3 earlier ones, and 3 tokens of a new one.
/// let queries = Tensor::new(&[0u32, 2, 5], &Device::Cpu)?;
/// let keys = Tensor::new(&[0u32, 5, 8], &Device::Cpu)?;
/// let (starts, ends) = Visible::packed(&queries, &keys, None).bounds(5, &Device::Cpu)?;
/// assert_eq!(starts.unwrap().to_vec1::<i64>()?, [0, 0, 5, 5, 5]);
/// assert_eq!(ends.unwrap().to_vec1::<i64>()?, [4, 5, 6, 7, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Visible(Rule);

#[derive(Debug, Clone, Default)]
enum Rule {
    #[default]
    All,
    Between {
        starts: Option<Tensor>,
        ends: Option<Tensor>,
    },
    Decode {
        lengths: Tensor,
    },
    Packed {
        queries: Tensor,
        keys: Tensor,
        offsets: Option<Tensor>,
    },
}

impl Visible {
    /// Every position of the row's sequence.
    #[must_use]
    pub fn all() -> Self {
        Self::default()
    }

    /// `[start, end)` of each row, `[S]`; an absent start is 0, an absent end the end of the keys.
    #[must_use]
    pub fn between(starts: Option<&Tensor>, ends: Option<&Tensor>) -> Self {
        Self(Rule::Between {
            starts: starts.cloned(),
            ends: ends.cloned(),
        })
    }

    /// Decoding: `lengths` `[B]` are the keys of each sequence, those of its n newest tokens
    /// included, which the S = B n rows are, sequence by sequence. Causal among them: row j of n
    /// sees the first length - n + 1 + j.
    #[must_use]
    pub fn decode(lengths: &Tensor) -> Self {
        Self(Rule::Decode {
            lengths: lengths.clone(),
        })
    }

    /// Causal prefill of packed sequences. `queries` and `keys`, `[B + 1]` each, are the cumulative
    /// lengths of both; sequence b has the rows `[queries[b], queries[b + 1])` and the packed keys
    /// `[keys[b], keys[b + 1])`. `offsets` `[B]` says at which position of its sequence the first
    /// query of each stands; without it the queries are the last tokens of their sequence. Rows from
    /// `queries[B]` on are padding and see nothing.
    #[must_use]
    pub fn packed(queries: &Tensor, keys: &Tensor, offsets: Option<&Tensor>) -> Self {
        Self(Rule::Packed {
            queries: queries.clone(),
            keys: keys.clone(),
            offsets: offsets.cloned(),
        })
    }

    /// The starts and ends of `rows` rows, where they are bounded at all: the tensors given, or I64
    /// `[S]` computed where the lengths lie.
    ///
    /// # Errors
    /// For tensors of a wrong shape, dtype or device.
    pub fn bounds(&self, rows: usize, device: &Device) -> Result<(Option<Tensor>, Option<Tensor>)> {
        match &self.0 {
            Rule::All => Ok((None, None)),
            Rule::Between { starts, ends } => {
                for (name, tensor) in [("starts", starts), ("ends", ends)] {
                    if let Some(tensor) = tensor {
                        check_bound(name, tensor, &[rows], device)?;
                    }
                }
                Ok((starts.clone(), ends.clone()))
            }
            _ => {
                let (starts, ends) = self.request(rows, device)?.run(rows)?;
                Ok((starts, Some(ends)))
            }
        }
    }

    /// The bounds of [`Visible::decode`] and [`Visible::packed`] into tensors of the caller, I64
    /// `[S]` and dense, in storages of their own: the ends, and for packed sequences the starts. As
    /// [`Visible::between`] they serve every op and every layer of a step.
    ///
    /// One launch and nothing else: no allocation, no upload, no readback and no synchronisation.
    ///
    /// # Errors
    /// For lengths or outputs of a wrong shape, dtype or device, for starts where there are none or
    /// their absence where there are, and for other bounds, which are tensors already.
    pub fn bounds_into(&self, starts: Option<&Tensor>, ends: &Tensor) -> Result<()> {
        let device = ends.device();
        let rows = ends.elem_count();
        let request = self.request(rows, device)?;
        for (name, tensor) in [("starts", starts), ("ends", Some(ends))] {
            let Some(tensor) = tensor else { continue };
            if tensor.dtype() != DType::I64 || tensor.dims() != [rows] {
                bail!(
                    "{BOUNDS}: {name} is {}, I64 [{rows}] is needed",
                    shown(tensor)
                )
            }
            check_bound(name, tensor, &[rows], device)?;
            check_dense(BOUNDS, name, tensor.layout())?;
        }
        match (&request, starts) {
            (Request::Decode { .. }, Some(_)) => {
                bail!("{BOUNDS}: starts are given, in decoding every row starts at 0")
            }
            (Request::Packed { .. }, None) => {
                bail!("{BOUNDS}: packed sequences start where others end, starts are needed too")
            }
            _ => request.run_into(rows, starts, ends),
        }
    }

    /// What bounds of `rows` rows are computed from, checked.
    fn request(&self, rows: usize, device: &Device) -> Result<Request<'_>> {
        check_size(BOUNDS, "the bounds", &[rows])?;
        match &self.0 {
            Rule::All | Rule::Between { .. } => {
                bail!(
                    "{BOUNDS}: they are given as they are, decode and packed are what is computed"
                )
            }
            Rule::Decode { lengths } => {
                let &[sequences] = lengths.dims() else {
                    bail!("{BOUNDS}: lengths is {}, [B] is needed", shown(lengths))
                };
                check_bound("lengths", lengths, &[sequences], device)?;
                if !rows.is_multiple_of(sequences) {
                    bail!(
                        "{BOUNDS}: q has {rows} rows for {sequences} lengths, a multiple is needed"
                    )
                }
                Ok(Request::Decode { lengths })
            }
            Rule::Packed {
                queries,
                keys,
                offsets,
            } => {
                let sequences = match queries.dims() {
                    &[n] if n > 0 => n - 1,
                    _ => bail!(
                        "{BOUNDS}: the cumulative query lengths are {}, [B + 1] is needed",
                        shown(queries)
                    ),
                };
                let cumulative = [sequences + 1];
                check_bound("the cumulative query lengths", queries, &cumulative, device)?;
                check_bound("the cumulative key lengths", keys, &cumulative, device)?;
                if let Some(offsets) = offsets {
                    check_bound("the query offsets", offsets, &[sequences], device)?;
                }
                Ok(Request::Packed {
                    queries,
                    keys,
                    offsets: offsets.as_ref(),
                })
            }
        }
    }
}

/// Refuses integers of another dtype, shape or device.
fn check_bound(name: &str, tensor: &Tensor, dims: &[usize], device: &Device) -> Result<()> {
    if !tensor.device().same_device(device) {
        bail!(
            "{BOUNDS}: {name} is on {:?} and q on {:?}, they must be on one device",
            tensor.device().location(),
            device.location()
        )
    }
    check_ints(BOUNDS, name, tensor, dims)
}

const BOUNDS: &str = "visible keys";

/// Bounds that are computed from lengths.
enum Request<'a> {
    Decode {
        lengths: &'a Tensor,
    },
    Packed {
        queries: &'a Tensor,
        keys: &'a Tensor,
        offsets: Option<&'a Tensor>,
    },
}

/// The same for a backend.
pub(crate) enum Lengths<'a, S> {
    Decode {
        lengths: Part<'a, S>,
    },
    Packed {
        sequences: usize,
        queries: Part<'a, S>,
        keys: Part<'a, S>,
        offsets: Option<Part<'a, S>>,
    },
}

impl Request<'_> {
    fn hold(&self) -> [Option<Held<'_>>; 3] {
        let held = match self {
            Self::Decode { lengths } => [Some(Held::new(lengths)), None, None],
            Self::Packed {
                queries,
                keys,
                offsets,
            } => [
                Some(Held::new(queries)),
                Some(Held::new(keys)),
                offsets.map(Held::new),
            ],
        };
        Held::lock(&held.iter().flatten().collect::<Vec<_>>());
        held
    }

    fn run(&self, rows: usize) -> Result<(Option<Tensor>, Tensor)> {
        let held = self.hold();
        let first = held[0].as_ref().expect("there are lengths");
        let (starts, ends) = match first.storage() {
            Storage::Cpu(_) => {
                let (starts, ends) = bounds(&self.lengths(&held), rows)?;
                let wrap = |data| Storage::Cpu(CpuStorage::I64(data));
                (starts.map(wrap), wrap(ends))
            }
            Storage::Cuda(_) => {
                let (starts, ends) = cuda::bounds(&self.lengths(&held), rows)?;
                (starts.map(Storage::Cuda), Storage::Cuda(ends))
            }
            Storage::Metal(_) => return no_metal(BOUNDS),
        };
        let tensor = |storage| Tensor::from((storage, Shape::from(rows)));
        Ok((starts.map(tensor), tensor(ends)))
    }

    fn run_into(&self, rows: usize, starts: Option<&Tensor>, ends: &Tensor) -> Result<()> {
        let held = self.hold();
        let all: Vec<&Held> = held.iter().flatten().collect();
        let on_cpu = matches!(all[0].storage(), Storage::Cpu(_));
        let offset = |tensor: &Tensor| tensor.layout().start_offset();
        let outputs: Vec<&Tensor> = starts.into_iter().chain([ends]).collect();
        write_to_all(BOUNDS, &outputs, &all, |locked| {
            let (ends_to, starts_to) = locked.split_last_mut().expect("ends are asked for");
            let starts_to = starts_to.first_mut().zip(starts.map(offset));
            if on_cpu {
                let (from, to) = bounds(&self.lengths(&held), rows)?;
                ends_to.i64()[offset(ends)..][..rows].copy_from_slice(&to);
                if let (Some((output, at)), Some(from)) = (starts_to, from) {
                    output.i64()[at..][..rows].copy_from_slice(&from);
                }
                Ok(())
            } else {
                let starts = starts_to.map(|(output, at)| (output.cuda(), at));
                let ends = (ends_to.cuda(), offset(ends));
                cuda::bounds_into(&self.lengths(&held), rows, starts, ends)
            }
        })
    }

    fn lengths<'a, S: Backend>(&self, held: &'a [Option<Held>; 3]) -> Lengths<'a, S> {
        let part = |i: usize| held[i].as_ref().map(Held::part);
        let given = |i| part(i).expect("it is held");
        match self {
            Self::Decode { .. } => Lengths::Decode { lengths: given(0) },
            Self::Packed { queries, .. } => Lengths::Packed {
                sequences: queries.elem_count() - 1,
                queries: given(0),
                keys: given(1),
                offsets: part(2),
            },
        }
    }
}

/// A length or offset, kept where sums cannot overflow; no tensor has as many elements.
fn moderate(x: i64) -> i64 {
    x.clamp(-(1 << 48), 1 << 48)
}

/// The starts and ends of the rows, on the CPU.
fn bounds(lengths: &Lengths<CpuStorage>, rows: usize) -> Result<(Option<Vec<i64>>, Vec<i64>)> {
    match lengths {
        Lengths::Decode { lengths } => {
            let sequences = lengths.layout.dims()[0];
            let lengths = Ints::new(lengths)?;
            let each = rows / sequences.max(1);
            let end = |row: usize| {
                let length = moderate(lengths.get(row / each, 0)).max(0);
                (length + 1 + (row % each) as i64 - each as i64).max(0)
            };
            Ok((None, (0..rows).map(end).collect()))
        }
        Lengths::Packed {
            sequences,
            queries,
            keys,
            offsets,
        } => {
            let (queries, keys) = (Ints::new(queries)?, Ints::new(keys)?);
            let offsets = offsets.as_ref().map(Ints::new).transpose()?;
            let (mut starts, mut ends) = (vec![0; rows], vec![0; rows]);
            for b in 0..*sequences {
                let (first, past) = (queries.get(b, 0), queries.get(b + 1, 0));
                let (first, past) = (moderate(first), moderate(past));
                let (start, end) = (moderate(keys.get(b, 0)), moderate(keys.get(b + 1, 0)));
                let offset = match &offsets {
                    Some(offsets) => moderate(offsets.get(b, 0)),
                    None => (end - start) - (past - first),
                };
                for row in first.max(0)..past.min(rows as i64) {
                    let visible = start + offset + (row - first) + 1;
                    starts[row as usize] = start;
                    ends[row as usize] = visible.min(end).max(start);
                }
            }
            Ok((Some(starts), ends))
        }
    }
}

/// The bounds of the rows for a backend.
pub(crate) struct Bounded<'a, S> {
    pub starts: Option<Part<'a, S>>,
    pub ends: Option<Part<'a, S>>,
}

/// On the CPU: the bounds of a row, clamped.
pub(crate) struct Clamped<'a> {
    starts: Option<Ints<'a>>,
    ends: Option<Ints<'a>>,
    length: usize,
}

impl<'a> Clamped<'a> {
    pub fn new(bounded: &Bounded<'a, CpuStorage>, length: usize) -> Result<Self> {
        let ints = |part: &Option<Part<'a, CpuStorage>>| part.as_ref().map(Ints::new).transpose();
        Ok(Self {
            starts: ints(&bounded.starts)?,
            ends: ints(&bounded.ends)?,
            length,
        })
    }

    /// Within `[0, length]`, and empty where the end lies below the start.
    pub fn row(&self, row: usize) -> std::ops::Range<usize> {
        let clamp = |x: i64| x.clamp(0, self.length as i64) as usize;
        let start = self.starts.as_ref().map_or(0, |s| clamp(s.get(row, 0)));
        let end = self
            .ends
            .as_ref()
            .map_or(self.length, |e| clamp(e.get(row, 0)));
        start..end.max(start)
    }
}
