//! Parameters of results that need more than their name.

use slat_bench::params::SHARED;
use slat_lab::param::Kind::{Bytes, Chunk, Of, Plain, Rate};
use slat_lab::param::{LAST, Params, param};

/// Those of guests under KVM, after those that tables have, too.
pub const PARAMS: Params = Params(&[
    SHARED,
    &[
        param(0, "host", "", Plain),
        param(7, "way", "", Plain),
        param(14, "manual_protect", "manual", Plain),
        param(15, "initially_set", "", Plain),
        param(16, "clear_chunk", "", Chunk),
        param(19, "runs", "", Plain),
        param(21, "slots", "", Plain),
        param(LAST, "delay_us", "delay", Of("µs")),
        param(LAST, "dirty_rate", "", Rate),
        param(LAST, "duration", "", Of("s")),
        param(LAST, "eager_split", "", Bytes),
        param(LAST, "interval_ms", "interval", Of("ms")),
        param(LAST, "limit", "", Bytes),
        param(LAST, "link", "", Rate),
        param(LAST, "allowed", "memory allowed", Of("%")),
        param(LAST, "queue", "", Bytes),
        param(LAST, "max_downtime_ms", "max downtime", Of("ms")),
        param(LAST, "slot_size", "", Bytes),
        param(LAST, "vcpu", "vCPU", Plain),
    ],
]);
