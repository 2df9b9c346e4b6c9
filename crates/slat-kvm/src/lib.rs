//! The host's KVM as something to measure, from user space and with no kernel tree.
//!
//! A guest of this crate exists to exercise second-level translation and does nothing else: it
//! has memory, vCPUs, and code that writes to its pages. Around it stand the ioctls whose cost
//! is in question and the kernel's own counters, so that each time that is measured has beside
//! it the faults, exits and zapped pages that explain it.
//!
//! - [`scenario`] has what a guest can be put through: dirty logging, execution, a migration, ...
//! - [`guest`] is the guest itself, for anything else one may want to time, and [`work`] what its
//!   vCPUs can be told to do.
//! - [`stall`] is what their own clocks show.
//! - [`ioctl`] is what the host's dirty log is asked by, and stands by itself.
//! - [`probe()`] says what the host's KVM can do; it changes nothing and needs no guest.
//!
//! The guest's code runs in ring 3. On VMX and SVM that is guest code like any other; on a KVM
//! without hardware virtualization, ring 0 code is interpreted by KVM's emulator, which writes
//! guest memory without a fault and so measures nothing of the MMU.

mod arch;
pub mod bitmap;
mod boot;
pub mod cgroup;
mod crew;
mod error;
mod gate;
pub mod guest;
pub mod hugetlb;
pub mod idle;
pub mod ioctl;
mod mailbox;
pub mod meminfo;
pub mod memory;
mod meter;
mod mode;
pub mod numa;
pub mod phase;
pub mod probe;
pub mod probes;
pub mod scenario;
mod shape;
mod stage;
pub mod stall;
pub mod stats;
mod trace;
mod vcpu;
pub mod work;

pub use error::{Advice, Error};
pub use memory::Backing;
pub use mode::Mode;
pub use probe::{HostKvm, probe};
pub use stage::{Event, Setting};
