//! What a virtual machine is made of, one home for `slat emulate`, the hypervisor and the tests:
//! packages of Debian's archive, kernels and their modules, initial file systems, QEMU.
//!
//! Packages are of any suite and architecture, verified by apt and unpacked without being
//! installed. Nothing needs root and the system's own apt keeps its lists, its cache and its
//! architectures: apt is given a configuration, a state and a cache of its own. The mirror is the
//! one that the machine already uses, and so are its proxies.

mod architecture;
mod archive;
mod initramfs;
mod kept;
mod kernel;
mod linux;
mod linux_source;
pub mod modules;
pub mod qemu;
mod sources;

pub use architecture::Architecture;
pub use archive::{Archive, Request};
pub use initramfs::Initramfs;
pub use kept::{cache_folder, kept};
pub use kernel::{Debian, Kernel, Teller};
pub use linux::Linux;
pub use linux_source::{SOURCES, linux_source};
pub use sources::Mirror;
