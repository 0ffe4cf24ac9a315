//! Memory at fixed addresses, for the forms of the ops that allocate nothing.

use super::cuda;
use crate::buffer::Buffer;
use crate::selection::{self, SelectionBuffers};
use candle_core::{bail, DType, Device, Result, Tensor};

/// The memory that selection and attention work in. Any call on its device fits; its size depends on the device
/// alone.
///
/// One serves any number of launches that follow each other.
#[derive(Debug)]
pub struct Workspace {
    device: Device,
    pub(super) selection: selection::Workspace,
    /// What blocks that share a row's positions leave for each other.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) parts: Buffer<f32>,
}

impl Workspace {
    /// # Errors
    /// On a device that is neither the CPU nor CUDA or has no memory left, and during a capture.
    pub fn new(device: &Device) -> Result<Self> {
        let parts = match device {
            Device::Cuda(device) => cuda::workspace_floats(device)?,
            _ => 0,
        };
        Ok(Self {
            device: device.clone(),
            selection: selection::Workspace::new(device)?,
            parts: Buffer::new("attention workspace", device, vec![0.; parts])?,
        })
    }

    pub(super) fn check(&self, op: &str, q: &Tensor) -> Result<()> {
        if !q.device().same_device(&self.device) {
            bail!(
                "{op}: q is on {:?} and the workspace on {:?}, they must be on one device",
                q.device().location(),
                self.device.location()
            )
        }
        Ok(())
    }
}

/// Scores and chosen positions at fixed addresses: what
/// [`index_topk_into`](super::index_topk_into) writes.
#[derive(Debug)]
pub struct IndexBuffers {
    pub(super) scores: Tensor,
    pub(super) chosen: SelectionBuffers,
}

impl IndexBuffers {
    /// For up to `rows` rows of up to `width` keys, and K positions a row.
    ///
    /// # Errors
    /// For sizes of 0, a K that no selector has, and where the device has no memory for them.
    pub fn new(rows: usize, width: usize, k: usize, device: &Device) -> Result<Self> {
        if width == 0 {
            bail!("index buffers: the width is 0, at least 1 key is needed")
        }
        Ok(Self {
            chosen: SelectionBuffers::new(rows, k, device)?,
            scores: Tensor::zeros((rows, width), DType::F32, device)?,
        })
    }

    /// The positions and counts: what attention takes
    /// ([`SparseAttention::forward_into`](super::SparseAttention::forward_into)).
    pub fn chosen(&self) -> &SelectionBuffers {
        &self.chosen
    }

    /// The scores, F32 `[rows, width]`. What a row doesn't see holds anything.
    pub fn scores(&self) -> &Tensor {
        &self.scores
    }
}
