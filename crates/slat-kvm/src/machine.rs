//! The VM and its memory, which a guest and its vCPUs share.

use crate::boot::Boot;
use crate::gate::Gate;
use crate::mailbox::Mailbox;
use crate::memory::HostMemory;
use crate::private::Private;
use kvm_ioctls::VmFd;

/// The VM and its memory. Each vCPU holds a reference to it, so that the memory outlives all vCPUs.
#[derive(Debug)]
pub(crate) struct Machine {
    // Fields are dropped in this order: the VM before the memory that it maps.
    pub vm: VmFd,
    pub memory: HostMemory,
    /// The private memory of memslots, beside the host's, if there is any.
    pub private: Option<Private>,
    pub boot: Boot,
    pub gate: Gate,
    pub page_size: u64,
}

impl Machine {
    pub fn mailbox(&self, vcpu: usize) -> Mailbox<'_> {
        self.boot.mailbox(vcpu).expect("the boot memory was made for all vCPUs")
    }
}
