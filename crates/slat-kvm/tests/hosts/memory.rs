//! What is said of a guest's memory: pages of hugetlbfs, private memory, pages and generations
//! that were used, and files and folders with odd names.

use super::{Host, ONE, PID};
use slat_kvm::procfs::Files;
use slat_kvm::watch::{Metric, Source, WorkingSets};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

#[test]
fn a_guest_on_hugetlbfs_has_memory_and_huge_pages() {
    let host = Host::new();
    host.process(&ONE);
    host.write(
        &format!("proc/{PID}/status"),
        format!(
            "Name:\tvmm\nTgid:\t{PID}\nVmRSS:\t   60000 kB\nVmSwap:\t       0 kB\n\
             HugetlbPages:\t16777216 kB\n"
        ),
    );
    let rollup = "00000000-7fffffff ---p 00000000 00:00 0  [rollup]\n\
                  Rss:   60000 kB\nPss:   58000 kB\n\
                  AnonHugePages:         0 kB\nShmemPmdMapped:        0 kB\n\
                  FilePmdMapped:         0 kB\nShared_Hugetlb:        0 kB\n\
                  Private_Hugetlb: 16777216 kB\n";
    host.write(&format!("proc/{PID}/smaps_rollup"), rollup);
    let watch = host.watch();
    let total = watch.guests()[0].total();
    let said = |metric| {
        let value = total.total.get(&metric).copied().unwrap_or(0);
        value >= 16 << 30
            || total.knowledge.unknown.get(&metric).is_some_and(|why| why.contains("hugetlb"))
    };
    let (rss, huge) = (said(Metric::RssBytes), said(Metric::HugeBytes));
    assert!(
        rss && huge,
        "RSS {:?}, huge {:?}, unknown {:?}, {:?}",
        total.total.get(&Metric::RssBytes),
        total.total.get(&Metric::HugeBytes),
        total.knowledge.unknown.get(&Metric::RssBytes),
        total.knowledge.unknown.get(&Metric::HugeBytes)
    );
}

#[test]
fn a_guest_with_private_memory_reports_its_missing_part() {
    let host = Host::new();
    host.process(&[
        "anon_inode:kvm-vm",
        "anon_inode:kvm-vcpu:0",
        "anon_inode:[kvm-gmem]",
        "/secretmem (deleted)",
    ]);
    host.write(
        &format!("proc/{PID}/status"),
        format!("Tgid:\t{PID}\nVmRSS:\t  500000 kB\nVmSwap:\t 0 kB\n"),
    );
    host.write(
        &format!("proc/{PID}/smaps_rollup"),
        "Rss: 500000 kB\nReferenced: 400000 kB\nAnonHugePages: 0 kB\n",
    );
    host.write(&format!("proc/{PID}/clear_refs"), "");
    let mut watch = host.watch();
    watch.estimate(WorkingSets::new(Duration::ZERO, None));
    watch.step();
    let total = watch.guests()[0].total();
    let sets = watch.working_sets().unwrap().told();
    let everything = format!("{total:?} {sets:?}").to_lowercase();
    let says = ["gmem", "guest_memfd", "private memory", "secretmem"]
        .iter()
        .any(|word| everything.contains(word));
    assert!(
        says,
        "RSS {:?}, working set {:?}, and no word about the guest_memfd",
        total.total.get(&Metric::RssBytes),
        sets.first().map(|set| (set.bytes, set.of_bytes, &set.error))
    );
}

const PRESENT: u64 = 1 << 63;
const LRU: u64 = 1 << 5;
const TAIL: u64 = 1 << 16;
const HEAD: u64 = 1 << 15;

/// A process whose pages have these frames.
fn idle(
    maps: &[u8],
    frames: impl Iterator<Item = u64>,
    flags: impl Fn(u64) -> u64,
    machine: u64,
) -> Host {
    let host = Host::new();
    host.process(&ONE);
    let bytes = |words: &mut dyn Iterator<Item = u64>| {
        words.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>()
    };
    host.write(&format!("proc/{PID}/maps"), maps);
    host.write(&format!("proc/{PID}/pagemap"), bytes(&mut frames.map(|frame| PRESENT | frame)));
    host.write("proc/kpageflags", bytes(&mut (0..machine).map(flags)));
    host.write("sys/kernel/mm/page_idle/bitmap", bytes(&mut (0..machine / 64).map(|_| 0)));
    host
}

/// Returns pages that were used, and all that were looked at, as the watch says after one interval.
fn working_set(host: &Host) -> (u64, u64) {
    let mut watch = host.watch();
    watch.estimate(WorkingSets::new(Duration::ZERO, Some(Source::IdlePages)));
    watch.step();
    let page = rustix::param::page_size() as u64;
    let sets = watch.working_sets().unwrap().told();
    let total = watch.guests()[0].total();
    let why = total.knowledge.unknown.get(&Metric::WorkingSetBytes);
    eprintln!("{sets:?}, unknown: {why:?}");
    sets.first().map_or((u64::MAX, u64::MAX), |set| (set.bytes / page, set.of_bytes / page))
}

fn mapped(name: &[u8]) -> Vec<u8> {
    let page = rustix::param::page_size() as u64;
    let mut maps = format!("0-{:x} rw-s 00000000 fe:00 12345    ", 8 * page).into_bytes();
    maps.extend_from_slice(name);
    maps.push(b'\n');
    maps
}

#[test]
fn the_pages_of_a_mapping_are_looked_at() {
    let host = idle(&mapped(b"/srv/vm/cafe.img"), 64..72, |_| LRU, 2048);
    assert_eq!(working_set(&host).1, 8);
}

#[test]
fn a_mapping_of_a_file_with_an_odd_name_is_looked_at() {
    let host = idle(&mapped(b"/srv/vm/caf\xe9.img"), 64..72, |_| LRU, 2048);
    assert_eq!(working_set(&host).1, 8);
}

#[test]
fn maps_that_cannot_be_read_are_no_working_set_of_nothing() {
    let host = idle(b"", 64..72, |_| LRU, 2048);
    assert_eq!(working_set(&host), (u64::MAX, u64::MAX));
}

#[test]
fn a_mount_whose_name_is_no_utf8_hides_no_other_mount() {
    let host = Host::new();
    host.write(
        "proc/mounts",
        b"/dev/vda / ext4 rw 0 0\n/dev/vdb /srv/caf\xe9 ext4 rw 0 0\n\
        none /sys/kernel/tracing tracefs rw 0 0\n",
    );
    assert!(host.files().is_mounted("tracefs"));
}

/// A mapping of this process, of a file with such a name, and the kernel's own text of it.
#[test]
fn huge_pages_are_counted_whatever_mapped_files_are_called() {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let folder = tempfile::tempdir().unwrap();
    assert!(Files::here().anon_huge_pages(0..u64::MAX).is_some(), "control: before the mapping");
    let file = folder.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.img"));
    fs::write(&file, [7; 4096]).unwrap();
    let file = fs::File::open(file).unwrap();
    // SAFETY: a new mapping, which nothing uses.
    unsafe {
        mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap()
    };
    assert!(Files::here().anon_huge_pages(0..u64::MAX).is_some(), "no answer");
}

fn generations(groups: &[u8], own: &str) -> Result<u64, String> {
    let host = Host::new();
    host.process(&ONE);
    host.write("sys/kernel/mm/lru_gen/enabled", "0x0007\n");
    host.write(&format!("proc/{PID}/cgroup"), format!("0::{own}\n"));
    host.write("sys/kernel/debug/lru_gen", groups);
    let mut watch = host.watch();
    watch.estimate(WorkingSets::new(Duration::ZERO, Some(Source::Generations)));
    watch.step();
    let total = watch.guests()[0].total();
    let sets = watch.working_sets().unwrap().told();
    sets.first()
        .map(|set| set.of_bytes)
        .ok_or_else(|| total.knowledge.unknown[&Metric::WorkingSetBytes].clone())
}

const ROWS: &str = concat!(
    " node     0\n   0      1000          8         0\n   1       900          8         0\n",
    "   2       800          8         0\n   3       700          8         0\n",
);

#[test]
fn a_group_in_lru_gen_is_found() {
    let text = format!("memcg     1 /\n{ROWS}memcg     5 /vm\n{ROWS}");
    eprintln!("{:?}", generations(text.as_bytes(), "/vm"));
    assert!(generations(text.as_bytes(), "/vm").is_ok());
}

#[test]
fn another_groups_odd_name_does_not_hide_this_one() {
    let mut text = format!("memcg     1 /\n{ROWS}memcg     4 /caf").into_bytes();
    text.extend_from_slice(format!("\u{0}\n{ROWS}memcg     5 /vm\n{ROWS}").as_bytes());
    let at = text.iter().position(|byte| *byte == 0).unwrap();
    text[at] = 0xe9;
    assert!(generations(&text, "/vm").is_ok(), "{:?}", generations(&text, "/vm"));
}

#[test]
fn a_group_whose_name_has_a_blank_is_found() {
    let text = format!("memcg     1 /\n{ROWS}memcg     5 /my vm\n{ROWS}");
    assert!(
        generations(text.as_bytes(), "/my vm").is_ok(),
        "{:?}",
        generations(text.as_bytes(), "/my vm")
    );
}

#[test]
fn a_mount_point_with_a_blank_hides_nothing() {
    let host = Host::new();
    host.write(
        "proc/mounts",
        "/dev/vdb /srv/a\\040b ext4 rw 0 0\nnone /sys/kernel/tracing tracefs rw 0 0\n",
    );
    assert!(host.files().is_mounted("tracefs") && host.files().is_mounted("ext4"));
}

fn of_a_huge_page(order: u32, from: u64) -> (u64, u64) {
    let (head, frames) = (1 << order, 1u64 << order);
    let maps = format!("0-{:x} rw-p 00000000 00:00 0\n", 512 * rustix::param::page_size() as u64);
    let flags = |frame: u64| match frame {
        it if it == head => LRU | HEAD,
        it if it > head && it < head + frames => LRU | TAIL,
        _ => LRU,
    };
    working_set(&idle(maps.as_bytes(), head + from..head + from + 512, flags, 2 * frames + 64))
}

#[test]
fn the_middle_of_a_huge_page_of_512_frames_is_counted() {
    let (_, all) = of_a_huge_page(9, 0);
    assert_eq!(all, 512);
}

#[test]
fn the_middle_of_a_huge_page_of_2048_frames_is_counted() {
    assert_eq!(of_a_huge_page(11, 600).1, 512, "32 MiB on a host with pages of 16 KiB");
}

#[test]
fn the_middle_of_a_huge_page_of_8192_frames_is_counted() {
    assert_eq!(of_a_huge_page(13, 600).1, 512, "512 MiB on a host with pages of 64 KiB");
}
