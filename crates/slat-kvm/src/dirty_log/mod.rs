//! The cost of dirty logging, phase by phase.
//!
//! The phases are those of Linux's `dirty_log_perf_test`, so that figures can be held against
//! those that kernel developers quote:
//!
//! | phase | what is timed |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time, logging off |
//! | enable | `KVM_SET_USER_MEMORY_REGION` with `KVM_MEM_LOG_DIRTY_PAGES` |
//! | dirty | every vCPU writes its share of its pages, logging on |
//! | get | `KVM_GET_DIRTY_LOG` of the whole slot |
//! | clear | `KVM_CLEAR_DIRTY_LOG` over the whole slot, in chunks; only with manual protect |
//! | disable | `KVM_SET_USER_MEMORY_REGION` without the flag |
//!
//! dirty, get and clear are repeated. vCPUs stand still while the host's phases run: this
//! measures the calls and the faults, each by itself, and not a migration.
//!
//! populate includes the host's own first touch of its pages, as it does in `dirty_log_perf_test`.
//! Where the host is itself a guest, memory that it never used before costs a fault of the machine
//! below, too: the first run after a boot can take ten times as long as the next.
//!
//! Every log that is fetched is held against the pages that the guest wrote, and at the end each
//! page against the stamp it must carry. A fast log that loses pages is an error.

mod config;
mod crew;
mod report;
mod run;

pub use crate::guest::Mode;
pub use config::Config;
pub use report::{MappedPages, Phase, PhaseRun, Report, VcpuRun};
pub use run::{Event, run};
