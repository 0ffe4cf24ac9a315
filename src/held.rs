//! Tensors held for reading.

use candle_core::{Layout, Storage, StorageRef, Tensor};
use std::rc::Rc;

/// A storage held for reading, which several tensors may share, and how a tensor lies in it.
pub(crate) type Guard<'a> = (Rc<StorageRef<'a>>, &'a Layout);

/// Tells storages apart.
pub(crate) fn address(storage: &Storage) -> usize {
    std::ptr::from_ref(storage).addr()
}

/// Locks the storages of tensors for reading, each once however many share it: between two locks of
/// one storage another thread may come to wait for writing to it, and then neither goes on.
pub(crate) fn lock<'a>(tensors: &[&'a Tensor]) -> Vec<Rc<StorageRef<'a>>> {
    let own = |tensor: &&Tensor| address(&tensor.storage_and_layout().0);
    let addresses: Vec<usize> = tensors.iter().map(own).collect();
    let mut locked: Vec<Rc<StorageRef>> = Vec::with_capacity(tensors.len());
    for (i, tensor) in tensors.iter().enumerate() {
        let earlier = addresses[..i].iter().position(|&its| its == addresses[i]);
        locked.push(match earlier {
            Some(j) => locked[j].clone(),
            None => Rc::new(tensor.storage_and_layout().0),
        });
    }
    locked
}

/// The same, with the tensors' layouts, where there are tensors.
pub(crate) fn hold<'a, const N: usize>(tensors: [Option<&'a Tensor>; N]) -> [Option<Guard<'a>>; N] {
    let given: Vec<&Tensor> = tensors.iter().flatten().copied().collect();
    let mut locked = lock(&given).into_iter();
    tensors.map(|tensor| {
        let layout = tensor?.layout();
        Some((locked.next()?, layout))
    })
}
