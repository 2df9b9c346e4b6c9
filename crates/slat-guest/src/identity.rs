//! Which guest a handle is of.

use alloc::sync::Arc;

/// A guest's identity. No other guest has the same while a copy of it exists, unlike an address or
/// a VMID, which a later guest may get.
#[derive(Clone, Debug)]
pub(crate) struct Identity(Arc<u8>);

impl Identity {
    pub fn new() -> Self {
        Self(Arc::new(0))
    }
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
