//! Tensors held for reading.

use candle_core::{Layout, Storage, StorageRef, Tensor};
use std::rc::Rc;

/// A storage held for reading, which several tensors may share, and how a tensor lies in it.
pub(crate) type Guard<'a> = (Rc<StorageRef<'a>>, &'a Layout);

/// Tells storages apart.
pub(crate) fn address(storage: &Storage) -> usize {
    std::ptr::from_ref(storage).addr()
}

/// Holds the storages of tensors, each once however many share it: between two locks of one storage
/// another thread may come to wait for writing to it, and then neither goes on.
pub(crate) fn hold<'a, const N: usize>(tensors: [Option<&'a Tensor>; N]) -> [Option<Guard<'a>>; N] {
    let addresses =
        tensors.map(|tensor| tensor.map(|tensor| address(&tensor.storage_and_layout().0)));
    let mut held: [Option<Guard>; N] = std::array::from_fn(|_| None);
    for (i, tensor) in tensors.into_iter().enumerate() {
        let Some(tensor) = tensor else {
            continue;
        };
        let earlier = addresses[..i].iter().position(|&its| its == addresses[i]);
        let storage = match earlier.and_then(|j| held[j].as_ref()) {
            Some((storage, _)) => storage.clone(),
            None => Rc::new(tensor.storage_and_layout().0),
        };
        held[i] = Some((storage, tensor.layout()));
    }
    held
}
