//! How often a guest's translations are invalidated when axaddrspace unmaps its memory, on the page
//! table that axvm has today, and on Slat.

#[path = "../tests/common/mod.rs"]
mod common;

use axaddrspace::{AddrSpace, MappingFlags, NestedPageTableOps};
use common::today::{self, Today};
use common::{G, Host, K, M, table};
use slat::BreakBeforeMake;
use slat::format::arm64::Arm64K4;

const RAM: MappingFlags =
    MappingFlags::READ.union(MappingFlags::WRITE).union(MappingFlags::EXECUTE);

/// Memory at an address that no block can map, so that there are only pages.
const ODD: usize = 16 * G + 4 * K;

/// Maps an address space by `map`, unmaps `size` bytes from `start`, and counts the invalidations.
fn counted<T: NestedPageTableOps>(
    table: T,
    map: impl FnOnce(&mut AddrSpace<T>),
    (start, size): (usize, usize),
    invalidations: impl Fn() -> u64,
) -> u64 {
    let mut space = AddrSpace::new_empty(table, 0.into(), 4 * G).unwrap();
    map(&mut space);
    invalidations();
    space.unmap(start.into(), size).unwrap();
    assert!(space.translate(start.into()).is_none());
    invalidations()
}

/// Counts invalidations on today's tables, and on Slat's, in each of the cases.
pub fn counts() -> [(&'static str, u64, u64); 3] {
    fn linear<T: NestedPageTableOps>(space: &mut AddrSpace<T>) {
        space.map_linear(G.into(), ODD.into(), G, RAM).unwrap();
    }
    fn blocks<T: NestedPageTableOps>(space: &mut AddrSpace<T>) {
        space.map_linear((G + 2 * M).into(), (16 * G + 2 * M).into(), G - 4 * M, RAM).unwrap();
    }
    fn allocated<T: NestedPageTableOps>(space: &mut AddrSpace<T>) {
        space.map_alloc(G.into(), 16 * M, RAM, true).unwrap();
    }
    let host = Host::new(BreakBeforeMake::Always);
    let slat = || table(Arm64K4 { split_execute: false, ..Default::default() }, 39, &host);
    let ours = || host.invalidations().len() as u64;
    let theirs = today::invalidations;
    [
        (
            "1 GiB of a linear area, pages of 4 KiB",
            counted(Today::new(), linear, (G, G), theirs),
            counted(slat(), linear, (G, G), ours),
        ),
        (
            "1020 MiB of a linear area, blocks of 2 MiB",
            counted(Today::new(), blocks, (G + 2 * M, G - 4 * M), theirs),
            counted(slat(), blocks, (G + 2 * M, G - 4 * M), ours),
        ),
        (
            "16 MiB of an allocated area",
            counted(Today::new(), allocated, (G, 16 * M), theirs),
            counted(slat(), allocated, (G, 16 * M), ours),
        ),
    ]
}

#[allow(dead_code, reason = "the test has one of its own")]
fn main() {
    println!("invalidations as AddrSpace::unmap runs      page-table-generic      slat");
    for (what, today, slat) in counts() {
        println!("{what:<43} {today:>18} {slat:>9}");
    }
    println!(
        "page-table-generic's hook names no guest: axvm on Arm invalidates all guests in each."
    );
    println!("Slat's name the guest, and the range. An allocated area is unmapped by axaddrspace");
    println!("page by page, and each page given back at once: one of that page each.");
}
