//! Checks the results of the example `live`.

#[path = "../examples/live.rs"]
mod live;

#[test]
fn a_running_vcpu_sees_no_fault_or_other_memory_during_changes() {
    let live::Beside { rounds, accesses, faults, window, strangers, lookups, wrong } =
        live::beside(20).unwrap();
    assert!(rounds >= 20 && accesses > 0 && window > 0 && lookups > 0);
    assert_eq!((faults, strangers, wrong), (0, 0, 0));
}

#[test]
fn a_write_protect_log_names_written_pages_at_one_fault_each() {
    let rounds = live::log_by_faults().unwrap();
    for ((found, faults), written) in rounds.iter().zip(live::WRITTEN) {
        let mut pages = written.to_vec();
        pages.sort();
        pages.dedup();
        assert_eq!((found, *faults), (&pages, pages.len() as u64));
    }
    assert_eq!(rounds.len(), live::WRITTEN.len());
}

#[test]
fn a_hardware_log_names_written_pages_without_a_fault() {
    let rounds = live::log_by_hardware().unwrap();
    let (first, later) = rounds.split_first().unwrap();
    assert_eq!(first.0, (0..2048).collect::<Vec<_>>(), "what was mapped counts as written");
    for ((found, faults), written) in later.iter().zip(live::WRITTEN) {
        let mut pages = written.to_vec();
        pages.sort();
        pages.dedup();
        assert_eq!((found, *faults), (&pages, 0));
    }
    assert_eq!(later.len(), live::WRITTEN.len());
}
