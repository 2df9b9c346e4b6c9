//! What a virtual machine is made of, one home for `slat emulate`, the hypervisor and the tests:
//! packages of Debian's archive, kernels, initial file systems.
//!
//! Packages are of any suite and architecture, verified by apt and unpacked without being installed.
//! Nothing needs root and the system's own apt keeps its lists, its cache and its architectures: apt
//! is given a configuration, a state and a cache of its own. The mirror is the one that the machine
//! already uses, and so are its proxies.

mod archive;
mod initramfs;
mod kept;
mod kernel;
mod sources;

pub use archive::{Archive, Request};
pub use initramfs::Initramfs;
pub use kept::kept;
pub use kernel::{Kernel, Teller};
pub use sources::Mirror;
