//! Parts of virtual machines, for `slat emulate`, the hypervisor and the tests: packages of
//! Debian's archive, kernels and their modules, initial file systems, QEMU.
//!
//! Packages can be of any suite and architecture. apt verifies them, and they are unpacked without
//! being installed. Nothing needs root, and the system's own apt lists, cache and architectures
//! stay unchanged, because apt runs with a separate configuration, state and cache. It uses the
//! mirror and the proxies that the machine already uses.

mod architecture;
mod archive;
pub mod console;
mod initramfs;
mod kept;
mod kernel;
mod linux;
mod linux_source;
pub mod modules;
pub mod qemu;
mod sources;
pub mod stuck;

pub use architecture::Architecture;
pub use archive::{Archive, Request};
pub use initramfs::Initramfs;
pub(crate) use kept::kept_below;
pub use kept::{cache_folder, kept};
pub use kernel::{Debian, Kernel, Teller};
pub use linux::Linux;
pub use linux_source::{SOURCES, linux_source};
pub use sources::Mirror;
