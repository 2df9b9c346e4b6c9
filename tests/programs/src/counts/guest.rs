//! Services of a guest with 16 MiB mapped in pages or 128 MiB mapped in blocks.

use crate::machine::{Machine, OnePiece};
use crate::{announce, measured, wanted};
use slat::{Access, BreakBeforeMake, Format, Gpa, GpaRange, PageSize, Vmid};
use slat_guest::{
    CachePolicy, Config, EagerSplit, Guest, Hva, HvaRange, MemslotId, MemslotSpec, Vcpu,
};
use std::hint::black_box;
use std::io;

const PAGE: PageSize = PageSize::SIZE_4K;
const PAGES: u64 = 4096;
const BLOCK: PageSize = PageSize::SIZE_2M;
const BLOCKS: u64 = 64;
const WORDS: usize = PAGES as usize / 64;
const SLOT: MemslotId = MemslotId(0);

type On<F> = Vcpu<'static, F, Machine, OnePiece>;

fn memslot(bytes: u64, log_dirty: bool) -> MemslotSpec {
    MemslotSpec { log_dirty, ..MemslotSpec::new(SLOT, Gpa(0), bytes, Hva(0)) }
}

/// Returns a vCPU of a guest without memory.
fn vcpu<F: Format + Default>(largest: PageSize, eager: Option<PageSize>) -> On<F> {
    let breaks = if F::REFILL_BREAKS { BreakBeforeMake::Always } else { BreakBeforeMake::Never };
    let config = Config {
        eager_split: eager,
        // Arm's guests have extra tables while their caches are off, which are not measured here.
        caches: CachePolicy::Every,
        ..Config::new(1, largest)
    };
    let machine = Machine::leaked(breaks);
    let guest = Guest::new(F::default(), Vmid(1), 40, machine, OnePiece, config);
    let guest = Box::leak(Box::new(guest.expect("the configuration is one of the format's")));
    Vcpu::new(guest, 0).expect("the reader memslot is free")
}

/// Returns a vCPU whose guest has written all of its memory, mapped in pages.
fn in_pages<F: Format + Default>(log_dirty: bool) -> On<F> {
    let mut vcpu = vcpu::<F>(PAGE, None);
    vcpu.worker()
        .set_memslot(memslot(PAGES * PAGE.bytes(), log_dirty))
        .expect("the memslot is the first");
    touch(&mut vcpu, PAGES, PAGE, Access::Write);
    vcpu
}

/// Returns a vCPU whose guest has written all of its memory, mapped in blocks.
fn in_blocks<F: Format + Default>(eager: Option<PageSize>) -> On<F> {
    let mut vcpu = vcpu::<F>(BLOCK, eager);
    vcpu.worker()
        .set_memslot(memslot(BLOCKS * BLOCK.bytes(), false))
        .expect("the memslot is the first");
    touch(&mut vcpu, BLOCKS, BLOCK, Access::Write);
    vcpu
}

fn touch<F: Format>(vcpu: &mut On<F>, count: u64, size: PageSize, access: Access) {
    for index in 0..count {
        black_box(vcpu.fault(Gpa(index * size.bytes()), access));
    }
}

/// Counts all services of a guest of one format.
pub fn all<F: Format + Default>(format: &'static str) -> io::Result<()> {
    let count = |operation: &str, units: u64, work: &mut dyn FnMut()| {
        let format = format!("guest, {format}");
        if !wanted(&format, operation) {
            // Later measurements need the result of this one.
            work();
            return Ok(());
        }
        announce(&format, operation, units)?;
        measured(work);
        io::Result::Ok(())
    };

    let mut fresh = vcpu::<F>(PAGE, None);
    fresh
        .worker()
        .set_memslot(memslot(PAGES * PAGE.bytes(), false))
        .expect("the memslot is the first");
    count("fault: map a page", PAGES, &mut || touch(&mut fresh, PAGES, PAGE, Access::Write))?;

    let mut fresh = vcpu::<F>(BLOCK, None);
    fresh
        .worker()
        .set_memslot(memslot(BLOCKS * BLOCK.bytes(), false))
        .expect("the memslot is the first");
    count("fault: map a block", BLOCKS, &mut || touch(&mut fresh, BLOCKS, BLOCK, Access::Write))?;

    let mut vcpu = in_pages::<F>(true);
    let mut log = [0; WORDS];
    count("read the log", PAGES, &mut || {
        black_box(vcpu.worker().read_log(SLOT, &mut log).expect("the bitmap is long enough"));
    })?;
    count("clear the log", PAGES, &mut || {
        let cleared = vcpu.worker().clear_log(SLOT, 0, PAGES, &log);
        black_box(cleared.expect("the memslot logs"));
    })?;
    count("fault: write a protected page", PAGES, &mut || {
        touch(&mut vcpu, PAGES, PAGE, Access::Write);
    })?;

    let mut vcpu = in_pages::<F>(false);
    let memory = GpaRange::new(Gpa(0), PAGES * PAGE.bytes()).expect("memory is not empty");
    let mut young = [0; WORDS];
    for operation in ["age, all young", "age, all old"] {
        count(operation, PAGES, &mut || {
            let aged = vcpu.worker().age(memory, None, &mut young, slat::AgeOptions::LEAVES);
            black_box(aged.expect("the bitmap is long enough"));
        })?;
    }
    let host = HvaRange { start: Hva(0), bytes: PAGES * PAGE.bytes() };
    count("invalidate by the host", PAGES, &mut || {
        drop(vcpu.worker().invalidate(host, |taken| _ = black_box(taken)));
    })?;

    let mut vcpu = in_blocks::<F>(None);
    let memory = GpaRange::new(Gpa(0), BLOCKS * BLOCK.bytes()).expect("memory is not empty");
    count("split blocks eagerly, a page", BLOCKS * 512, &mut || {
        black_box(EagerSplit::new(memory, PAGE).run(vcpu.worker(), || false));
    })?;

    let mut vcpu = in_blocks::<F>(None);
    let logs = memslot(BLOCKS * BLOCK.bytes(), true);
    count("begin to log, a block", BLOCKS, &mut || {
        black_box(vcpu.worker().set_memslot(logs).expect("the memslot is there"));
    })?;
    count("fault: split a block for a write", BLOCKS, &mut || {
        touch(&mut vcpu, BLOCKS, BLOCK, Access::Write);
    })?;
    let quiet = memslot(BLOCKS * BLOCK.bytes(), false);
    count("end to log, a block put together", BLOCKS, &mut || {
        black_box(vcpu.worker().set_memslot(quiet).expect("the memslot is there"));
    })
}
