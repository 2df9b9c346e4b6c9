//! Parameters of results that need more than their name.

use slat_lab::param::Kind::{Bytes, Of, Plain};
use slat_lab::param::{LAST, Param, Params, Role, param};

/// Those of this crate's results, some of which guests under KVM have, too.
pub const SHARED: &[Param] = &[
    param(1, "format", "", Plain),
    param(2, "memory", "", Bytes),
    param(3, "vcpus", "vCPUs", Plain),
    param(4, "granule", "", Bytes),
    param(5, "backing", "pages", Plain),
    param(6, "target_size", "", Bytes),
    param(8, "when", "", Plain),
    param(9, "what", "", Plain),
    param(10, "bbm", "BBM level", Plain),
    param(11, "overlap", "", Plain),
    param(12, "bits", "dirty of 64", Plain),
    param(13, "exit_ns", "exit", Of("ns")),
    param(17, "write_percent", "% written", Plain),
    param(18, "iterations", "", Plain),
    param(20, "bytes", "", Bytes).role(Role::Derived),
    param(22, "entries", "", Plain).role(Role::Derived),
    param(23, "asked", "", Plain),
    param(LAST, "operation", "", Plain).role(Role::Title),
    param(LAST, "part", "", Plain).role(Role::Title),
    param(LAST, "figure", "", Plain).role(Role::Title),
    param(LAST, "chunk_size", "", Bytes),
];

/// The same, for tables.
pub const PARAMS: Params = Params(&[SHARED]);
