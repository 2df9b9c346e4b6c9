//! Checks the numbers of the example `invalidations`.

#[path = "../examples/invalidations.rs"]
mod invalidations;

#[test]
fn unmapping_a_gigabyte_of_pages_invalidates_once() {
    let [pages, blocks, allocated] = invalidations::counts();
    assert_eq!((pages.1, pages.2), ((1 << 30) / 4096, 1));
    assert_eq!((blocks.1, blocks.2), ((1020 << 20) / (2 << 20), 1));
    // axaddrspace gives each page back before it unmaps the next.
    assert_eq!((allocated.1, allocated.2), ((16 << 20) / 4096, (16 << 20) / 4096));
}
