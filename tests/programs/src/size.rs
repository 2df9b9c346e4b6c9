//! What the engine's operations add to a bare-metal user's text.
//!
//! Each function is one operation for one format on one platform, whose side effects are somebody
//! else's code. `cargo xtask size` builds this for a target without an operating system and reads
//! the archive; on any other target the crate is empty.

#![cfg_attr(target_os = "none", no_std)]

#[cfg(target_os = "none")]
#[path = "size/operations.rs"]
mod operations;
