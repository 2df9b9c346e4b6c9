//! What memory management costs the KVM guests that run on this host now, watched from outside.
//!
//! Nothing is changed in a guest, and nothing is switched on in the host: what is held are
//! descriptors, which go with the process that holds them, however it ends. [`Watch`] finds guests
//! and takes samples; each [`Metric`] is told with who told it ([`Source`]), or is missing, and
//! there is a reason. [`own`] is for a VMM that watches itself.

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
mod watch;
mod working_set;

pub use debugfs::Debugfs;
pub use events::Events;
pub use events::times::{Stalls, Times, Why, faults};
pub use find::{Descriptors, Found, NotFound, Search, descriptors, guest as find_guest, guests};
pub use guest::{Guest, Knowledge, Reading, State};
pub use metric::{Metric, Scope, Source, Values, since};
pub use watch::{GuestTotal, Sample, Step, VcpuTotal, Watch, Watched, Which};
pub use working_set::{WorkingSet, WorkingSets};
