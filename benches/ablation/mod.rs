//! The runs of the ablation as entries of the bench: the kernels that ship, and `candle_topk::cuda::ablation`.

use super::{Args, Case, Dist, Entry, Gpu, Op, Row, Run, Type, Variant, ABLATION_OPS};
use crate::common::Params;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::Result;
use candle_topk::cuda::ablation::{self, with_run, RUNS};
use candle_topk::sampling::Routes;
use serde_json::json;

pub fn entries() -> Vec<Entry> {
    let shipped = |op| {
        let techniques = json!({
            "truncation": "hit", "search": "ranked", "duplicates": true, "tuned": true,
        });
        let variant = Some(Variant {
            name: "shipped",
            techniques,
        });
        Entry {
            variant,
            ..Entry::of(op)
        }
    };
    let varied = |kernels: ablation::Run, op: Op| {
        let Entry { name, make, .. } = Entry::of(op);
        let techniques = json!({
            "truncation": kernels.truncation, "search": kernels.search,
            "duplicates": kernels.duplicates, "tuned": kernels.tuned,
        });
        Entry {
            op,
            name,
            variant: Some(Variant {
                name: kernels.name,
                techniques,
            }),
            make: Box::new(move |case| {
                Ok(Box::new(Varied {
                    kernels,
                    run: make(case)?,
                }))
            }),
        }
    };
    let of = |op| std::iter::once(shipped(op)).chain(RUNS.map(|kernels| varied(kernels, op)));
    ABLATION_OPS.into_iter().flat_map(of).collect()
}

/// Loads the runs' kernels, and gives those that sort rows memory to do it in.
pub fn prepare(
    gpu: &Gpu,
    args: &Args,
    shapes: &[(Dist, Type, usize, usize)],
) -> Result<Option<CudaSlice<u8>>> {
    if !args.ablation {
        return Ok(None);
    }
    let most = shapes.iter().map(|&(_, _, b, v)| b * v).max().unwrap_or(0);
    let scratch: CudaSlice<u8> = gpu.cuda.alloc_zeros(16 * most)?;
    let address = scratch.device_ptr(&gpu.stream).0;
    for run in RUNS {
        run.preload(&gpu.cuda)?;
        // SAFETY: the caller keeps it until the end.
        unsafe { run.lend(&gpu.cuda, address) }?;
    }
    Ok(Some(scratch))
}

/// An op with other kernels.
struct Varied {
    kernels: ablation::Run,
    run: Box<dyn Run>,
}

impl Run for Varied {
    fn launch(&mut self, case: &Case) -> Result<()> {
        // SAFETY: `prepare` has lent memory for the widest case.
        unsafe { with_run(self.kernels, || self.run.launch(case)) }
    }

    fn routes(&self, case: &Case) -> Result<Vec<Routes>> {
        // SAFETY: as in `launch`.
        unsafe { with_run(self.kernels, || self.run.routes(case)) }
    }

    fn compare(&mut self, case: &Case, row: &Row) -> Result<std::result::Result<(), String>> {
        let params = match self.kernels.duplicates {
            true => case.params,
            false => with_equals(case.params, row),
        };
        self.run.compare(&Case { params, ..*case }, row)
    }
}

/// What keeps the same of a row, and all that equals the last of it.
fn with_equals(params: Params, row: &Row) -> Params {
    let order = &row.oracle.order;
    let len = row.oracle.expected(&params).len;
    let Some(&last) = len.checked_sub(1).and_then(|at| order.get(at)) else {
        return params;
    };
    let value = |id: u32| row.logits[id as usize];
    let equals = order[len..]
        .iter()
        .take_while(|&&id| value(id) == value(last));
    match equals.count() {
        0 => params,
        more => Params {
            k: len + more,
            p: 1.0,
            min_p: 0.0,
            ..params
        },
    }
}
