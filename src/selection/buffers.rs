//! Outputs at fixed addresses, and the memory that blocks exchange through.

use super::plan::{workspace_bytes, DeviceProps};
use super::rows::{check_size, Rows};
use super::topk::{Selection, TopK};
use super::{cuda, MAX_K, OP};
use crate::buffer::Buffer;
use candle_core::{bail, Device, Result, Tensor};

/// What error messages call these buffers.
const WHAT: &str = "selection buffers";

/// How a row's set was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// The row is not counted: on the CPU, and where no launch has reached it.
    None,
    /// No proposal was needed: the row holds at most K scores, all of it fitted on chip, or its
    /// exact histogram gave the cutoff.
    Direct,
    /// The sampled cutoff was certified by the first pass over the row.
    Primary,
    /// The first pass found fewer than K; the second, down to the secondary cutoff, found enough.
    Band,
    /// A histogram of the whole row gave the cutoff, after the sampled ones had failed.
    Recovered,
}

/// What the kernels counted on the way to one row's set: how it was found, not what it is.
///
/// A measurement of the implementation, for tuning and for tests: it may differ between mappings and
/// versions, where results may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRoute {
    /// How the set was found.
    pub route: Route,
    /// Scores that the passes admitted as candidates. What did not fit on chip was counted, the
    /// cutoff raised, and the rest looked at again.
    pub admitted: u32,
    /// How often what was collected was cut down to its K best and the cutoff raised, because more
    /// was admitted than fits on chip.
    pub raised: u32,
    /// Scores read from global memory, the sample included.
    pub scores_read: u64,
}

impl RowRoute {
    fn of(counters: &[u32]) -> Self {
        let route = match counters[0] {
            1 => Route::Direct,
            2 => Route::Primary,
            3 => Route::Band,
            4 => Route::Recovered,
            _ => Route::None,
        };
        Self {
            route,
            admitted: counters[1],
            raised: counters[2],
            scores_read: counters[3] as u64 * SCORES_READ_UNIT,
        }
    }

    /// The achieved row-equivalent traffic of the paper's section 2.1: scores read over the row's
    /// `length`. 1 is one pass.
    pub fn row_equivalents(&self, length: usize) -> f64 {
        self.scores_read as f64 / length.max(1) as f64
    }
}

/// Counters of a row: `RouteCounters` in `kernels/selection/select.cuh`.
const COUNTERS: usize = 4;
/// The last counter is in this unit, so that it fits a word.
const SCORES_READ_UNIT: u64 = 16;

/// The positions, counts and, if asked for, values and routes of up to `rows` rows, at fixed
/// addresses: [`TopK::select_into`] writes them and allocates nothing.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_topk::selection::{Bounds, SelectionBuffers, TopK, Workspace};
///
/// # fn main() -> candle_core::Result<()> {
/// let scores = Tensor::new(&[[1f32, 3., 2.]], &Device::Cpu)?;
/// let mut out = SelectionBuffers::new(8, 2, &Device::Cpu)?;
/// let mut workspace = Workspace::new(&Device::Cpu)?;
/// TopK::new(2)?.select_into(&scores, &Bounds::full(), &mut out, &mut workspace)?;
/// assert_eq!(out.selection()?.positions.to_vec2::<u32>()?[0], [1, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SelectionBuffers {
    rows: usize,
    k: usize,
    device: Device,
    pub(super) positions: Buffer<u32>,
    pub(super) counts: Buffer<u32>,
    pub(super) values: Option<Buffer<f32>>,
    pub(super) routes: Option<Buffer<u32>>,
}

impl SelectionBuffers {
    /// Buffers of `rows` rows of `k` positions. A row that no launch has reached is empty.
    ///
    /// # Errors
    /// For no row or above 2^27 - 1, a `k` of 0 or above [`MAX_K`], more than there is memory for, and
    /// on a device that is neither the CPU nor CUDA.
    pub fn new(rows: usize, k: usize, device: &Device) -> Result<Self> {
        if rows == 0 {
            bail!("{WHAT}: the number of rows is 0, at least 1 is needed")
        }
        check_size(rows, 1)?;
        if k == 0 || k > MAX_K {
            bail!("{WHAT}: k is {k}, 1 to {MAX_K} are accepted")
        }
        Ok(Self {
            rows,
            k,
            device: device.clone(),
            positions: Buffer::filled(WHAT, device, u32::MAX, (rows, k))?,
            counts: Buffer::filled(WHAT, device, 0, (rows, 1))?,
            values: None,
            routes: None,
        })
    }

    /// Holds values too, for a [`TopK::with_values`].
    ///
    /// # Errors
    /// Where the device has no memory for them.
    pub fn with_values(mut self) -> Result<Self> {
        let shape = (self.rows, self.k);
        let values = Buffer::filled(WHAT, &self.device, f32::NEG_INFINITY, shape)?;
        self.values = Some(values);
        Ok(self)
    }

    /// Counts the [`RowRoute`] of every row of every launch from here on.
    ///
    /// # Errors
    /// Where the device has no memory for them.
    pub fn with_routes(mut self) -> Result<Self> {
        let routes = Buffer::filled(WHAT, &self.device, 0, (self.rows, COUNTERS))?;
        self.routes = Some(routes);
        Ok(self)
    }

    /// How many rows fit.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// K.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The positions `[rows, K]`, for an op that reads them where they lie.
    pub(crate) fn positions(&self) -> &Buffer<u32> {
        &self.positions
    }

    /// Where the buffers lie.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// What all rows hold: a copy on the device.
    ///
    /// # Errors
    /// Where the device fails, and during a capture.
    pub fn selection(&self) -> Result<Selection> {
        let selected = (self.rows, self.k);
        let values = self.values.as_ref();
        Ok(Selection {
            positions: self.positions.to_tensor(selected)?,
            counts: self.counts.to_tensor(self.rows)?,
            values: values.map(|v| v.to_tensor(selected)).transpose()?,
        })
    }

    /// How the last launch that reached each row found its set.
    ///
    /// # Errors
    /// Without [`with_routes`](Self::with_routes), where the device fails, and during a capture.
    pub fn routes(&self) -> Result<Vec<RowRoute>> {
        match &self.routes {
            Some(routes) => {
                let counters = routes.read()?;
                Ok(counters.chunks(COUNTERS).map(RowRoute::of).collect())
            }
            None => bail!("{WHAT}: routes are not counted, make the buffers with with_routes()"),
        }
    }

    pub(super) fn check(&self, top: &TopK, rows: &Rows, scores: &Tensor) -> Result<()> {
        if !scores.device().same_device(&self.device) {
            bail!(
                "{OP}: scores are on {:?} and the buffers on {:?}, they must be on one device",
                scores.device().location(),
                self.device.location()
            )
        }
        if rows.count > self.rows {
            bail!(
                "{OP}: scores have shape {:?}, the buffers hold {} rows, at most as many are accepted",
                scores.dims(),
                self.rows
            )
        }
        if top.k != self.k {
            bail!(
                "{OP}: k is {} and the buffers are made for {}, they must be equal",
                top.k,
                self.k
            )
        }
        if top.values && self.values.is_none() {
            bail!("{OP}: values are asked for and the buffers hold none, make them with with_values()")
        }
        Ok(())
    }
}

/// The device memory through which blocks that share a row exchange what they collect. Any launch on
/// its device fits; its size depends on the device alone.
///
/// A launch leaves it as it found it, so one serves any number of launches that follow each other.
#[derive(Debug)]
pub struct Workspace {
    device: Device,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) words: Buffer<u32>,
}

impl Workspace {
    /// # Errors
    /// On a device that is neither the CPU nor CUDA or has no memory left, and during a capture.
    pub fn new(device: &Device) -> Result<Self> {
        const WHAT: &str = "selection workspace";
        let bytes = match device {
            Device::Cuda(device) => workspace_bytes(&cuda::device_props(device)?),
            _ => 0,
        };
        Ok(Self {
            device: device.clone(),
            words: Buffer::new(WHAT, device, vec![0; bytes / size_of::<u32>()])?,
        })
    }

    pub(super) fn check(&self, scores: &Tensor) -> Result<()> {
        if !scores.device().same_device(&self.device) {
            bail!(
                "{OP}: scores are on {:?} and the workspace on {:?}, they must be on one device",
                scores.device().location(),
                self.device.location()
            )
        }
        Ok(())
    }
}

impl DeviceProps {
    /// Those of a CUDA device.
    ///
    /// # Errors
    /// For another device, and without the feature `cuda`.
    pub fn of(device: &Device) -> Result<Self> {
        match device {
            Device::Cuda(device) => cuda::device_props(device),
            _ => bail!(
                "{OP}: the device is {:?}, a CUDA device is planned for",
                device.location()
            ),
        }
    }
}
