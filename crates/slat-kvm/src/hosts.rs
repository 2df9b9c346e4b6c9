//! Each reader of this crate over the hosts of `tests/procfs`.

use crate::idle::AccessTracking;
use crate::procfs::Files;
use crate::{Backing, Error, hugetlb, meminfo, numa, trace};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// What is to be told of two huge pages, of the nodes 0 and of the tracer, in part.
struct HostFacts {
    host: &'static str,
    /// MiB that are available.
    memory: Result<u64, &'static str>,
    huge_page: u64,
    pool: Result<(), &'static str>,
    node: Result<(), &'static str>,
    tracer: &'static str,
}

const HOSTS: [HostFacts; 6] = [
    HostFacts {
        host: "x86-v2",
        memory: Ok(768),
        huge_page: 2 * MIB,
        pool: Err("0 are free"),
        node: Ok(()),
        tracer: "not mounted",
    },
    HostFacts {
        host: "arm-16k-hybrid",
        memory: Ok(256),
        huge_page: 32 * MIB,
        pool: Err("1 are free"),
        node: Err("has no memory"),
        tracer: "not mounted",
    },
    HostFacts {
        host: "arm-64k-v1",
        memory: Ok(4096),
        huge_page: 512 * MIB,
        pool: Ok(()),
        node: Err("node/has_memory does not tell"),
        tracer: "not mounted",
    },
    HostFacts {
        host: "locked-down",
        memory: Ok(256),
        huge_page: 2 * MIB,
        pool: Err("no pool of that size"),
        node: Err("has no memory"),
        tracer: "locked down",
    },
    HostFacts {
        host: "container",
        memory: Ok(384),
        huge_page: 2 * MIB,
        pool: Err("/sys/fs/cgroup leaves 2 MiB"),
        node: Err("has no memory"),
        tracer: "not mounted",
    },
    HostFacts {
        host: "odd-bytes",
        memory: Err("/proc/meminfo does not tell"),
        huge_page: 2 * MIB,
        pool: Err("mm/hugepages does not tell"),
        node: Err("has no memory"),
        tracer: "not mounted",
    },
];

#[test]
fn each_host_has_the_memory_that_its_files_say() {
    for it in HOSTS {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/procfs").join(it.host);
        let files = Files(&root);
        let is = |told: Result<(), Error>, wanted: Result<(), &str>| {
            let told = told.map_err(|error| error.to_string());
            match (&told, wanted) {
                (Err(told), Err(wanted)) => assert!(told.contains(wanted), "{}: {told}", it.host),
                _ => assert_eq!(told.is_ok(), wanted.is_ok(), "{}: {told:?}", it.host),
            }
        };
        let memory = meminfo::within(files);
        if let Ok(memory) = &memory {
            assert_eq!(Ok(memory.bytes / MIB), it.memory, "{}", it.host);
        }
        is(memory.map(drop), it.memory.map(drop));
        is(hugetlb::check_in(files, it.huge_page, 2), it.pool);
        is(numa::check_in(files, &[0], 2 * MIB, Backing::Small), it.node);
        let tracer = trace::below(files).unwrap_err();
        assert!(tracer.contains(it.tracer), "{}: {tracer}", it.host);
        let tracking = AccessTracking::below(&root);
        assert!(matches!(tracking, Err(Error::NoAccessTracking { refused: None })), "{}", it.host);
    }
}
