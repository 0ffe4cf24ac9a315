//! Shape to kernel: a pure function of K, M, N, the dtype and the device.
//!
//! It never sees a length: the rows' bounds stay on the device, so one captured launch serves any.

use super::rows::check_size;
use super::{MAX_K, OP};
use candle_core::{bail, DType, Result};
use std::fmt;

/// What of a CUDA device a plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceProps {
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of shared memory that a block can have.
    pub shared_per_block: usize,
    /// The most blocks of a cluster: 0 without clusters, else 8, or 16 where the device has
    /// non-portable sizes.
    pub cluster: usize,
}

impl DeviceProps {
    /// An H200.
    pub const H200: Self = Self {
        multiprocessors: 132,
        capability: (9, 0),
        shared_per_block: 227 << 10,
        cluster: 16,
    };

    /// An A100.
    pub const A100: Self = Self {
        multiprocessors: 108,
        capability: (8, 0),
        shared_per_block: 163 << 10,
        cluster: 0,
    };
}

/// How rows are laid on blocks: section 4.5 and 5.5 of the paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mapping {
    /// One block a row, which has all of it in its registers and counts it exactly, without a sample.
    /// For rows of up to 8,192 F32 scores, or 16,384 of the others.
    Short,
    /// One block a row, two to a multiprocessor: while one refines, the other streams. For many rows.
    Block,
    /// One block a row, alone on its multiprocessor: for up to as many rows as the device has
    /// multiprocessors.
    RowLocal,
    /// The same with all of the row in its shared memory, where what reaches the cutoff is looked up as soon as all is
    /// there. For rows of up to 65,536 scores that fit there, on devices of compute capability 9.0.
    Held,
    /// A few blocks a row, 2, 4, 8 or 16, that meet in the workspace; the last to
    /// arrive refines. On any device.
    Split(u32),
    /// A cluster of 2, 4, 8 or 16 blocks a row, that meet in the first one's shared
    /// memory. On devices of compute capability 9.0.
    Cluster(u32),
    /// A block a row, or a cluster of 2, 4, 8 or 16, which have all of it in their shared memory and count FP16's
    /// rounding of it exactly, without a sample. A row that has more than K + 4096 scores whose roundings share the
    /// leading 11 bits with the K-th best's, or exceed it, is read again, four times or more in whole. For rows that fit
    /// there, on devices of compute capability 9.0.
    Exact(u32),
}

impl Mapping {
    /// Blocks of a row.
    pub fn blocks(self) -> u32 {
        match self {
            Self::Short | Self::Block | Self::RowLocal | Self::Held => 1,
            Self::Split(blocks) | Self::Cluster(blocks) | Self::Exact(blocks) => blocks,
        }
    }
}

/// Which scores of a row propose its cutoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum View {
    /// 32 adjacent bytes from each group of as many times 32 as the stride says, their place in the
    /// group a hash of row and group: no period of the scores can lock onto them.
    #[default]
    Jittered,
    /// Every stride-th score from an offset that depends on the row: section 4.2 of the paper.
    FixedStride,
}

/// What differs from the plan that the shape would have. Results do not depend on it. Where anything about the
/// sample is said, and no mapping, a row that a cluster would hold on chip is sampled nonetheless. A mapping
/// without a sample takes no notice of what is said about it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overrides {
    /// The mapping.
    pub mapping: Option<Mapping>,
    /// The sampling stride: a power of two from 1 to 256. 1 looks at every score of the row first:
    /// an exact proposal.
    pub stride: Option<u32>,
    /// How many times K the primary cutoff aims at, from 1 to 4: the paper's margin, 1.5 there. By
    /// default the aim lies a few deviations of the sample's rank beyond K.
    pub margin: Option<f32>,
    /// Whether a second pass, down to the secondary cutoff, comes before the exact recovery.
    pub band: Option<bool>,
    /// The view.
    pub view: Option<View>,
}

/// The shape of a selection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanRequest {
    /// K.
    pub k: usize,
    /// Rows.
    pub m: usize,
    /// The width of a row.
    pub n: usize,
    /// Scores from the start of one row to the next. Rows are taken to begin at boundaries of 16 bytes where
    /// it is a multiple of them; for a view whose first row begins elsewhere give an odd one.
    pub pitch: usize,
    /// The scores' dtype: F32, F16 or BF16.
    pub dtype: DType,
    /// The device.
    pub device: DeviceProps,
    /// What is not left to the planner.
    pub overrides: Overrides,
}

/// How a selection runs. `Display` gives one line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// How rows are laid on blocks.
    pub mapping: Mapping,
    /// Blocks of the grid.
    pub grid: usize,
    /// One score in so many proposes the cutoff.
    pub stride: u32,
    /// Which ones.
    pub view: View,
    /// How many times K the cutoff aims at; else as many deviations as `deviations` says beyond K.
    pub margin: Option<f32>,
    /// Deviations of the sample's rank that the aim lies beyond K.
    pub deviations: f32,
    /// Whether an underfilled row tries its secondary cutoff before the exact recovery.
    pub band: bool,
    /// Candidates that fit on chip.
    pub capacity: usize,
    /// Bytes of dynamic shared memory a block.
    pub shared_bytes: usize,
    /// Bytes of the workspace that the launch uses.
    pub workspace_bytes: usize,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.mapping {
            Mapping::Short => {
                return write!(
                    f,
                    "short, {} blocks, {} KiB shared",
                    self.grid,
                    self.shared_bytes >> 10
                )
            }
            Mapping::Block => write!(f, "block")?,
            Mapping::RowLocal => write!(f, "row-local")?,
            Mapping::Held => write!(f, "held")?,
            Mapping::Split(blocks) => write!(f, "split-{blocks}")?,
            Mapping::Cluster(blocks) => write!(f, "cluster-{blocks}")?,
            Mapping::Exact(blocks) => {
                return write!(
                    f,
                    "exact-{blocks}, {} blocks, {} KiB shared",
                    self.grid,
                    self.shared_bytes >> 10
                )
            }
        }
        match self.stride {
            1 => write!(f, ", exact proposal")?,
            stride => write!(f, ", stride {stride}")?,
        }
        if self.view == View::FixedStride {
            write!(f, " fixed")?;
        }
        match self.margin {
            Some(margin) => write!(f, ", margin {margin}")?,
            None => write!(f, ", {} deviations", self.deviations)?,
        }
        if !self.band {
            write!(f, ", no band")?;
        }
        write!(
            f,
            ", {} blocks, {} KiB shared, {} KiB workspace",
            self.grid,
            self.shared_bytes >> 10,
            self.workspace_bytes >> 10
        )
    }
}

/// Threads of a block: `kThreads` in the kernels' files.
pub(super) const THREADS: u32 = 512;
/// The most scores that a block has in its registers: `kDepth` vectors a thread.
fn held(dtype: DType) -> usize {
    THREADS as usize * DEPTH * VECTOR_BYTES / dtype.size_in_bytes()
}
/// Vectors of a thread: `kDepth` in `kernels/selection/select.cuh`.
const DEPTH: usize = 4;
pub(super) const VECTOR_BYTES: usize = 16;
/// Candidates beyond K that fit on chip: at least a vector of 8 for each of 512 threads, so that
/// after the cutoff is raised one more always fits.
const SLACK: usize = 4096;
const _: () = assert!(
    MAX_K <= SLACK,
    "a list that is cut down to K fits in what one block hands to another"
);
/// Bins of the histograms: `kBins` in `kernels/selection/select.cuh`.
const BINS: usize = 2048;

/// Bytes of the queues of all warps, in the place of two histograms: `kLists` there.
const QUEUES: usize = 64 * (VECTOR_BYTES + 4) * THREADS as usize / 32;
const _: () = assert!(QUEUES >= 2 * 4 * BINS, "a place for the histograms");

/// Bytes of the workspace for each block: `kHeader` and the candidates of `SLACK`.
const SEGMENT_BYTES: usize = 64 + 8 * SLACK;

/// Blocks that can share rows through the workspace at once.
fn split_blocks(device: &DeviceProps) -> usize {
    2 * device.multiprocessors
}

/// The workspace that any launch on this device fits in.
pub(super) fn workspace_bytes(device: &DeviceProps) -> usize {
    split_blocks(device) * SEGMENT_BYTES
}

/// How a selection of this shape runs on this device.
///
/// # Errors
/// For a K of 0 or above [`MAX_K`], a width of 0 or a size beyond what is supported, another dtype, a
/// device below compute capability 8.0, and overrides that the device or the shape does not admit.
pub fn plan(request: &PlanRequest) -> Result<Plan> {
    let PlanRequest {
        k,
        m,
        n,
        pitch: _,
        dtype,
        device,
        overrides,
    } = *request;
    if k == 0 || k > MAX_K {
        bail!("{OP}: k is {k}, 1 to {MAX_K} are accepted")
    }
    check_size(m, n)?;
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        bail!("{OP}: scores are {dtype:?}, F32, F16 or BF16 is needed")
    }
    if device.capability < (8, 0) {
        bail!(
            "{OP}: the device has compute capability {}.{}, 8.0 or later is needed",
            device.capability.0,
            device.capability.1
        )
    }
    let mapping = match overrides.mapping {
        Some(mapping) => check_mapping(mapping, request)?,
        None => mapping(request),
    };
    let stride = match overrides.stride {
        Some(stride) if stride.is_power_of_two() && stride <= 256 => stride,
        Some(stride) => {
            bail!("{OP}: the sampling stride is {stride}, a power of two from 1 to 256 is accepted")
        }
        None => stride(mapping, n, k, dtype),
    };
    if let Some(margin) = overrides.margin {
        if !(1.0..=4.0).contains(&margin) {
            bail!("{OP}: the margin is {margin}, 1 to 4 times K are accepted")
        }
    }
    let capacity = capacity(k);
    Ok(Plan {
        mapping,
        grid: m * mapping.blocks() as usize,
        stride,
        view: overrides.view.unwrap_or_default(),
        margin: overrides.margin,
        deviations: DEVIATIONS,
        band: overrides.band.unwrap_or(true),
        capacity,
        shared_bytes: shared_bytes(mapping, request),
        workspace_bytes: match mapping {
            Mapping::Split(blocks) => m * blocks as usize * SEGMENT_BYTES,
            _ => 0,
        },
    })
}

/// Candidates that fit on chip.
fn capacity(k: usize) -> usize {
    k.next_multiple_of(64) + SLACK
}

/// `dynamic` in `kernels/selection/select.cuh`: the queues, or two histograms, the candidates, as many again where the other
/// blocks of a cluster send theirs, and the order of the selected; in the place of that, the part of a row that is held
/// there.
fn shared_bytes(mapping: Mapping, request: &PlanRequest) -> usize {
    let k = request.k;
    let inbox = matches!(mapping, Mapping::Cluster(_)) as usize;
    let slice = match mapping {
        Mapping::Exact(blocks) => slice_bytes(blocks as usize, request),
        Mapping::Held => slice_bytes(1, request),
        _ => 0,
    };
    let order = 2 * k.next_power_of_two().max(64);
    QUEUES + (1 + inbox) * 8 * capacity(k) + slice.max(order)
}

/// What a block of so many has of a row: as many vectors for each thread. A row that begins between two vectors has
/// one more.
fn slice_bytes(blocks: usize, request: &PlanRequest) -> usize {
    let width = VECTOR_BYTES / request.dtype.size_in_bytes();
    let vectors = request.n.div_ceil(width) + !request.pitch.is_multiple_of(width) as usize;
    vectors.div_ceil(THREADS as usize * blocks) * THREADS as usize * VECTOR_BYTES
}

/// Static shared memory of `select_exact`, and what a block takes beside, at most: `exact.cuh` checks it.
const BESIDE: usize = 8 << 10;

/// Whether so many blocks hold a row.
fn is_held(blocks: usize, request: &PlanRequest) -> bool {
    let bytes = shared_bytes(Mapping::Exact(blocks as u32), request) + BESIDE;
    bytes <= request.device.shared_per_block
}

/// Scores of a row that a block by itself has, as whole vectors of all threads: 16 bits number them.
const NUMBERED: usize = 1 << 16;
/// Whether a block holds a row that is sampled.
fn is_held_alone(request: &PlanRequest) -> bool {
    let scores = slice_bytes(1, request) / request.dtype.size_in_bytes();
    request.device.cluster > 0 && scores <= NUMBERED && is_held(1, request)
}

fn check_mapping(mapping: Mapping, request: &PlanRequest) -> Result<Mapping> {
    let blocks = mapping.blocks() as usize;
    let device = &request.device;
    match mapping {
        Mapping::Split(2 | 4 | 8 | 16) if request.m * blocks > split_blocks(device) => bail!(
            "{OP}: {} rows of {blocks} blocks are planned, {} blocks share rows through the workspace at most",
            request.m,
            split_blocks(device)
        ),
        Mapping::Cluster(2 | 4 | 8 | 16) | Mapping::Exact(1 | 2 | 4 | 8 | 16)
            if blocks > device.cluster =>
        {
            match device.cluster {
                0 => bail!("{OP}: a cluster of {blocks} blocks is planned, the device has no clusters"),
                most => bail!(
                    "{OP}: a cluster of {blocks} blocks is planned, the device has clusters of up to {most}"
                ),
            }
        }
        Mapping::Exact(1 | 2 | 4 | 8 | 16) if !is_held(blocks, request) => bail!(
            "{OP}: rows of {} scores are planned to be held by clusters of {blocks} blocks, each of which needs {} bytes of shared memory for them, the device has {}",
            request.n,
            shared_bytes(mapping, request) + BESIDE,
            device.shared_per_block
        ),
        Mapping::Split(2 | 4 | 8 | 16)
        | Mapping::Cluster(2 | 4 | 8 | 16)
        | Mapping::Exact(1 | 2 | 4 | 8 | 16) => Ok(mapping),
        Mapping::Exact(_) => {
            bail!("{OP}: {blocks} blocks a row are planned, 1, 2, 4, 8 or 16 are accepted")
        }
        Mapping::Split(_) | Mapping::Cluster(_) => {
            bail!("{OP}: {blocks} blocks a row are planned, 2, 4, 8 or 16 are accepted")
        }
        Mapping::Short if request.n > held(request.dtype) => bail!(
            "{OP}: rows of {} scores are planned to be held by a block each, which holds up to {}",
            request.n,
            held(request.dtype)
        ),
        Mapping::Held if device.cluster == 0 => bail!(
            "{OP}: rows are planned to be held by a block each and sampled, which is for devices of compute capability 9.0"
        ),
        Mapping::Held if !is_held_alone(request) => bail!(
            "{OP}: rows of {} scores are planned to be held by a block each, which holds up to {NUMBERED} and needs {} bytes of shared memory for them, the device has {}",
            request.n,
            shared_bytes(mapping, request) + BESIDE,
            device.shared_per_block
        ),
        Mapping::Short | Mapping::Block | Mapping::RowLocal | Mapping::Held => Ok(mapping),
    }
}

// What follows was measured on an H200 (f32, K = 2048, raised ends; us of a graph's replay), as exact and sampled
// clusters of so many blocks, and a block a row, which is alone but of 256 rows, or holds it:
//
// |   M |    N | exact            | sampled          | block     | held |
// |-----|------|------------------|------------------|-----------|------|
// |   8 |  16K |  4:  8.9         |                  |           |      |
// |  64 |  16K |  2: 10.7         |                  |           |      |
// | 128 |  16K |  1: 11.7         |                  |           | 11.4 |
// | 256 |  16K |                  |                  |      18.9 | 18.5 |
// |   8 |  32K |  8:  8.5, 4: 10.1|                  |           |      |
// |  32 |  32K |  2: 11.4, 4: 15.5|  2: 14.1         |           |      |
// |  64 |  32K |  2: 11.7, 1: 16.2|  2: 14.6         |           | 12.5 |
// | 128 |  32K |  1: 17.3         |                  |      15.8 | 14.8 |
// | 256 |  32K |                  |                  |      22.9 | 24.8 |
// |   1 |  64K | 16:  9.3, 8:  9.8|                  |           |      |
// |   8 |  64K |  8:  9.7         |                  |           |      |
// |  32 |  64K |  2: 17.6         |  2: 14.8         |           |      |
// |  64 |  64K |  2: 19.1         |  2: 16.9         |           |      |
// |   8 | 128K |  8: 10.9         |  8: 12.0         |           |      |
// |  16 | 128K |  4: 16.5         |  4: 14.1         |           |      |
// |  32 | 128K |                  |  2: 16.3, 4: 22.5|           |      |
// |  64 | 128K |                  |  2: 19.9         |      22.0 |      |
// |   1 | 256K | 16: 10.9         | 16: 12.0         |           |      |
// |   8 | 256K |  8: 15.5         |  8: 13.5         |           |      |
//
// 128 rows of 64K of BF16 take 19.0 by blocks, and 17.7 held. So what is more than half of the multiprocessors has rows for,
// and more than counting is worth, is held where it fits.
//
// A sampled row (us):
//
// |   M |    N | mapping                               |       |
// |-----|------|---------------------------------------|-------|
// | 128 | 128K | cluster of 2: two rounds              |  42.2 |
// | 128 | 128K | block a row, alone                    |  28.1 |
// | 128 | 128K | block a row, room for two             |  30.3 |
// | 256 |  32K | block a row, alone: two rounds        |  31.5 |
// | 512 | 256K | block a row, s = 64, 4 deviations     | 149.5 |
// | 512 | 256K | the same, 3: one row is read twice    | 182.1 |
// | 512 | 256K | block a row, s = 128, 2.5             | 215.9 |
//
// So all blocks of a launch run at once, one to a multiprocessor, as long as there are so few. A cluster lies in one group
// of multiprocessors, which have 16 or so of them, and some fewer: large clusters do not fill the device. And rows of which
// a block has little are held: all of it is counted, four cycles of a multiprocessor for each warp's atomic to shared
// memory, but there is no sample to wait for.

/// The most of a row that a block holds and counts.
const HELD: usize = 16_384;
/// Of scores that are spread evenly from 0 up, one in so many has its rounding's leading bits in common with the K-th
/// best. Rows of which that is more than the list takes would be read again and again.
const EVEN: usize = 64;
/// The shortest part of a row that is worth a block of its own.
const SLICE: usize = 4096;

fn mapping(request: &PlanRequest) -> Mapping {
    let PlanRequest {
        m,
        n,
        dtype,
        device,
        overrides,
        ..
    } = *request;
    if n <= held(dtype) {
        return Mapping::Short;
    }
    let Overrides {
        stride,
        margin,
        band,
        view,
        ..
    } = overrides;
    let sampled = stride.is_some() || margin.is_some() || band.is_some() || view.is_some();
    let slices = |blocks: &usize| blocks * SLICE <= n.next_power_of_two();
    if device.cluster > 0 && device.capability == (9, 0) {
        // A block takes a multiprocessor.
        let room = |blocks: &usize| match blocks {
            16 => device.multiprocessors / 2,
            2 => device.multiprocessors,
            _ => device.multiprocessors * 6 / 7,
        };
        let fits = |blocks: &usize| blocks * m <= room(blocks) && slices(blocks);
        if let Some(blocks) = [16, 8, 4, 2].into_iter().find(fits) {
            let blocks = blocks.min(device.cluster);
            let even = n / EVEN <= capacity(request.k);
            let little = n.div_ceil(blocks) <= HELD;
            return match !sampled && even && little && is_held(blocks, request) {
                true => Mapping::Exact(blocks as u32),
                false => Mapping::Cluster(blocks as u32),
            };
        }
        if !sampled && m <= device.multiprocessors && n <= HELD && is_held(1, request) {
            return Mapping::Exact(1);
        }
    } else {
        let fits = |blocks: &usize| blocks * m <= split_blocks(&device) && slices(blocks);
        if let Some(blocks) = [16, 8, 4, 2].into_iter().find(fits) {
            return Mapping::Split(blocks as u32);
        }
    }
    match m <= device.multiprocessors {
        // An exact proposal looks at all of a row first, and there is no more of it to hold.
        true if device.capability == (9, 0) && stride != Some(1) && is_held_alone(request) => {
            Mapping::Held
        }
        true => Mapping::RowLocal,
        false => Mapping::Block,
    }
}

fn stride(mapping: Mapping, n: usize, k: usize, dtype: DType) -> u32 {
    let stride = match (mapping, n) {
        (_, 0..=16_384) => 8,
        (_, 16_385..=65_536) => 16,
        // Many rows keep the bandwidth busy meanwhile.
        (Mapping::Block, _) | (_, 131_073..) => 64,
        _ => 32,
    };
    // What is admitted varies with the root of K times the stride, and `SLACK` is the same for all K. And of scores of half
    // the size twice as many are read by as many loads: 512 rows of 128K take 71.9 us with 64, and 67.4 with 32.
    match k > MAX_K / 2 || dtype != DType::F32 {
        true => stride.min(32),
        false => stride,
    }
}

/// Deviations of the sample's rank that a cutoff lies beyond K: one row in 30,000 or so is read again. With
/// three it is one in 700, and the 512 rows of a launch wait for it.
const DEVIATIONS: f32 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(m: usize, n: usize, device: DeviceProps) -> PlanRequest {
        PlanRequest {
            k: 2048,
            m,
            n,
            pitch: n,
            dtype: DType::F32,
            device,
            overrides: Overrides::default(),
        }
    }

    #[test]
    fn every_shape_has_a_plan_that_fits() -> Result<()> {
        for device in [DeviceProps::H200, DeviceProps::A100] {
            for m in [0, 1, 2, 8, 31, 64, 128, 132, 256, 512, 8192, 1 << 20] {
                for n in [
                    1,
                    7,
                    2048,
                    8192,
                    8193,
                    32768,
                    131_072,
                    131_073,
                    1 << 20,
                    1 << 30,
                ] {
                    for k in [1, 7, 2048, 4096] {
                        let plan = plan(&PlanRequest {
                            k,
                            ..request(m, n, device)
                        })?;
                        let what = format!("{k}, {m} x {n}: {plan}");
                        assert!(plan.shared_bytes <= device.shared_per_block, "{what}");
                        assert!(plan.workspace_bytes <= workspace_bytes(&device), "{what}");
                        assert!(plan.workspace_bytes <= 16 << 20, "{what}");
                        assert!(plan.capacity >= k + SLACK, "{what}");
                        assert_eq!(plan.grid, m * plan.mapping.blocks() as usize);
                        check_mapping(plan.mapping, &request(m, n, device))?;
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn mappings() -> Result<()> {
        let h200 =
            |m, n| Ok::<_, candle_core::Error>(plan(&request(m, n, DeviceProps::H200))?.mapping);
        assert_eq!(h200(1, 8192)?, Mapping::Short);
        assert_eq!(h200(8192, 8192)?, Mapping::Short);
        assert_eq!(h200(1, 131_072)?, Mapping::Exact(16));
        assert_eq!(h200(8, 131_072)?, Mapping::Exact(8));
        assert_eq!(h200(16, 131_072)?, Mapping::Cluster(4));
        assert_eq!(h200(32, 131_072)?, Mapping::Cluster(2));
        assert_eq!(h200(64, 32_768)?, Mapping::Exact(2));
        assert_eq!(h200(128, 16_384)?, Mapping::Exact(1));
        assert_eq!(h200(128, 32_768)?, Mapping::Held);
        assert_eq!(h200(64, 40_960)?, Mapping::Cluster(2));
        assert_eq!(h200(128, 40_961)?, Mapping::RowLocal);
        assert_eq!(h200(128, 65_536)?, Mapping::RowLocal);
        assert_eq!(h200(256, 32_768)?, Mapping::Block);
        assert_eq!(h200(64, 262_144)?, Mapping::Cluster(2));
        // An even law would fill the bin of the K-th beyond what a list takes.
        assert_eq!(h200(1, 1 << 20)?, Mapping::Cluster(16));
        let sampled = plan(&PlanRequest {
            overrides: Overrides {
                stride: Some(1),
                ..Overrides::default()
            },
            ..request(8, 131_072, DeviceProps::H200)
        })?;
        assert_eq!(sampled.mapping, Mapping::Cluster(8));
        // Rows that begin between two vectors need a little more.
        let odd = |n, pitch| {
            plan(&PlanRequest {
                pitch,
                ..request(1, n, DeviceProps::H200)
            })
        };
        let (even, odd) = (odd(131_072, 131_072)?, odd(131_072, 131_073)?);
        assert_eq!(even.mapping, odd.mapping);
        assert_eq!(odd.shared_bytes - even.shared_bytes, 8 << 10);
        assert_eq!(h200(128, 131_072)?, Mapping::RowLocal);
        assert_eq!(h200(512, 131_072)?, Mapping::Block);
        let a100 = plan(&request(1, 131_072, DeviceProps::A100))?;
        assert_eq!(a100.mapping, Mapping::Split(16));
        assert!(a100.workspace_bytes > 0);
        Ok(())
    }

    #[test]
    fn overrides() -> Result<()> {
        let with = |overrides| {
            plan(&PlanRequest {
                overrides,
                ..request(4, 131_072, DeviceProps::H200)
            })
        };
        let forced = with(Overrides {
            mapping: Some(Mapping::Split(2)),
            stride: Some(128),
            margin: Some(1.5),
            band: Some(false),
            view: Some(View::FixedStride),
        })?;
        assert_eq!(
            forced.to_string(),
            "split-2, stride 128 fixed, margin 1.5, no band, 8 blocks, 72 KiB shared, 256 KiB workspace"
        );
        let refused = |overrides| with(overrides).expect_err("refused").to_string();
        let mapping = |mapping| Overrides {
            mapping: Some(mapping),
            ..Overrides::default()
        };
        assert!(refused(mapping(Mapping::Split(3))).contains("3 blocks"));
        assert!(refused(mapping(Mapping::Cluster(32))).contains("32"));
        assert!(refused(Overrides {
            stride: Some(48),
            ..Overrides::default()
        })
        .contains("48"));
        assert!(refused(Overrides {
            margin: Some(f32::NAN),
            ..Overrides::default()
        })
        .contains("NaN"));
        Ok(())
    }
}
