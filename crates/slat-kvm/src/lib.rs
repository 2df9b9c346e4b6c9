//! Measurements of the host's KVM from user space, without a kernel tree.
//!
//! A guest of this crate only exercises second-level translation: it has memory, vCPUs, and code
//! that writes to its pages. The crate times the ioctls and the guest's accesses, and reads the
//! kernel's counters with each time, so that the faults, exits and zapped pages that explain a time
//! are reported with it.
//!
//! - [`scenario`] has the experiments: dirty logging, execution, a migration, ...
//! - [`check`] runs random histories, and finds out whether KVM loses a write.
//! - [`guest`] has the guest itself, for other experiments, and [`work`] the work that its vCPUs
//!   can do.
//! - [`figure`] says what the results of a scenario are, and how they are shown.
//! - [`stall`] finds stalls in the times that the vCPUs' own clocks measured.
//! - [`ioctl`] has the ioctls of dirty logging, and depends on nothing else in this crate.
//! - [`watch`] measures guests that run on this host already, under any VMM.
//! - [`probe()`] reports the capabilities of the host's KVM. It changes nothing and needs no guest.
//!
//! On x86, the guest's code runs in ring 3. With VMX and SVM this makes no difference. A KVM
//! without hardware virtualization interprets ring 0 code in its emulator, which writes guest
//! memory without a fault, so that nothing of the MMU would be measured.

mod arch;
pub mod bitmap;
mod boot;
pub mod cgroup;
pub mod check;
mod error;
pub mod figure;
mod gate;
pub mod guest;
#[cfg(test)]
mod hosts;
pub mod hugetlb;
pub mod idle;
pub mod image;
pub mod ioctl;
mod knobs;
mod ksm;
mod machine;
mod mailbox;
pub mod meminfo;
pub mod memory;
mod meter;
mod mode;
pub mod numa;
mod pagemap;
pub mod phase;
mod private;
pub mod probe;
pub mod probes;
pub mod procfs;
pub mod scenario;
mod shape;
mod stage;
pub mod stall;
pub mod stats;
mod trace;
mod uffd;
mod vcpu;
mod vcpu_threads;
pub mod watch;
pub mod work;

pub(crate) use error::size_name;
pub use error::{Advice, Error};
pub use memory::Backing;
pub use mode::Mode;
pub use probe::{HostKvm, probe};
pub use stage::{Event, Setting};
