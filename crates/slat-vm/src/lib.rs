//! Packages of Debian's archive for any suite and architecture, verified by apt and unpacked without
//! being installed, and its kernels, fetched once and kept.
//!
//! Nothing needs root and the system's own apt keeps its lists, its cache and its architectures: apt
//! is given a configuration, a state and a cache of its own. The mirror is the one that the machine
//! already uses, and so are its proxies.

mod archive;
mod kept;
mod kernel;
mod sources;

pub use archive::{Archive, Request};
pub use kept::kept;
pub use kernel::{Kernel, Teller};
pub use sources::Mirror;
