//! Measures what memory management costs the KVM guests of this host, from outside the guests.
//!
//! [`Watch`] finds guests and takes samples. A sample gives each [`Metric`] with its [`Source`], or
//! the reason why the metric is missing. The watch changes nothing in a guest, and nothing in the
//! host unless [`Watch::estimate`] is called. It only holds descriptors, which the kernel closes
//! when the process that holds them ends, however it ends. [`own`] is for a VMM that measures
//! itself.

mod bpf;
mod debugfs;
mod events;
mod find;
mod guest;
mod held;
mod metric;
pub mod own;
pub mod qmp;
mod task;
mod traced;
mod tracepoints;
mod watcher;
mod working_set;

pub use debugfs::Debugfs;
pub use events::Events;
pub use events::times::{Stalls, Times, Why, faults};
pub use find::{
    Descriptors, GuestProcess, NotFound, Search, descriptors, guest as find_guest, guests,
};
pub use guest::{Guest, Knowledge, Reading, State};
pub use metric::{Metric, Scope, Source, Values, since};
pub use watcher::{GuestTotal, Sample, Step, ThreadChange, VcpuTotal, Watch, WatchedGuest, Which};
pub use working_set::{WorkingSet, WorkingSets};
