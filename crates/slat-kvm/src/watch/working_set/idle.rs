//! Idle page tracking (Documentation/admin-guide/mm/idle_page_tracking.rst): a page is marked by
//! its frame number, and any access clears the mark, including one of a KVM guest.

use super::{UsedBytes, page};
use crate::pagemap::{FRAME, PRESENT};
use crate::procfs::Files;
use crate::watch::task;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

const BITMAP: &str = "sys/kernel/mm/page_idle/bitmap";

pub(super) const ERROR: &str = "exact to a page, huge ones as a whole; pages count as unused that \
                                a TLB kept all the time, and pages in hugetlbfs are not looked at";
pub(super) const CHANGES: &str = "marks pages as idle, which disturbs others that use the idle \
                                  bitmap; the host's reclaim is not";

/// Bits of a frame's flags (kpageflags).
const LRU: u64 = 1 << 5;
const TAIL: u64 = 1 << 16;
const HUGETLB: u64 = 1 << 17;

/// Most pages that are read in one go.
const MOST: u64 = 1 << 16;

/// Frames of huge pages on the LRU: 2 MiB of 4K pages, and 512 MiB of 64K pages (32 MiB of 16K
/// pages lie between).
const USUAL: u64 = 512;
const LARGEST: u64 = 8192;

#[derive(Debug)]
pub(super) struct Idle {
    pid: i32,
    bitmap: File,
    pagemap: File,
    flags: File,
}

impl Idle {
    pub fn open(files: &Files<'_>, pid: i32) -> Result<Self, String> {
        let bitmap = OpenOptions::new().read(true).write(true).open(files.0.join(BITMAP));
        let bitmap = bitmap.map_err(|error| match files.0.join(BITMAP).exists() {
            true => format!("page_idle: {error}; run as root"),
            false => "no page_idle (CONFIG_IDLE_PAGE_TRACKING)".to_owned(),
        })?;
        let open = |path: String| {
            File::open(files.0.join(&path)).map_err(|error| format!("{path}: {error}; run as root"))
        };
        let (pagemap, flags) =
            (open(format!("proc/{pid}/pagemap"))?, open("proc/kpageflags".to_owned())?);
        Ok(Self { pid, bitmap, pagemap, flags })
    }

    /// Calls `take` with runs of frames of all memory that the process may write to. Frames ascend
    /// within each go.
    fn each(
        &self,
        files: &Files<'_>,
        mut take: impl FnMut(&[u64]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut entries = vec![0; 8 * MOST as usize];
        let mappings = task::mappings(files, self.pid, |access| access.contains('w'));
        let mappings = mappings.ok().flatten().filter(|all| !all.is_empty());
        for range in mappings.ok_or("the process's maps cannot be read, or it has none")? {
            let end = range.end / page();
            let mut at = range.start / page();
            while at < end {
                let count = (end - at).min(MOST);
                let bytes = &mut entries[..8 * count as usize];
                self.pagemap
                    .read_exact_at(bytes, 8 * at)
                    .map_err(|error| format!("pagemap: {error}"))?;
                let entries = numbers(bytes).filter(|entry| entry & PRESENT != 0);
                let mut frames: Vec<u64> = entries.map(|entry| entry & FRAME).collect();
                frames.sort_unstable();
                frames.dedup();
                if frames.first() == Some(&0) {
                    return Err("pagemap hides frames: run as root (CAP_SYS_ADMIN)".to_owned());
                }
                frames.chunk_by(|one, next| one + 1 == *next).try_for_each(&mut take)?;
                at += count;
            }
        }
        Ok(())
    }

    pub fn make(&self, files: &Files<'_>) -> Result<(), String> {
        self.each(files, |run| {
            let (first, last) = (run[0], run[run.len() - 1]);
            let mut words = vec![0u64; (last / 64 - first / 64 + 1) as usize];
            run.iter()
                .for_each(|frame| words[(frame / 64 - first / 64) as usize] |= 1 << (frame % 64));
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            match self.bitmap.write_all_at(&bytes, first / 64 * 8) {
                // A page without a mark counts as used.
                Err(error) if !is_end(&error) => Err(format!("page_idle: {error}")),
                _ => Ok(()),
            }
        })
    }

    pub fn look(&self, files: &Files<'_>) -> Result<UsedBytes, String> {
        let (mut used, mut all) = (0, 0);
        self.each(files, |run| {
            let flags = self.read(&self.flags, run[0], run.len() as u64, "kpageflags")?;
            let words = run[run.len() - 1] / 64 - run[0] / 64 + 1;
            let words = self.read(&self.bitmap, run[0] / 64, words, "page_idle")?;
            let is_idle =
                |frame: u64| words[(frame / 64 - run[0] / 64) as usize] >> (frame % 64) & 1 != 0;
            // Only the first frame of a huge page has a mark.
            let mut first = None;
            for (frame, flags) in run.iter().zip(flags) {
                let (flags, idle) = match (flags & TAIL != 0, first) {
                    (false, _) => (flags, is_idle(*frame)),
                    (true, Some(first)) => first,
                    (true, None) => self.first_of(*frame)?,
                };
                first = Some((flags, idle));
                // Pages of hugetlbfs are not on the LRU, and neither are pages that were allocated
                // a moment ago.
                if flags & HUGETLB == 0 && flags & LRU != 0 {
                    all += page();
                    used += if idle { 0 } else { page() };
                }
            }
            Ok(())
        })?;
        Ok(UsedBytes { used, all })
    }

    /// Returns flags and mark of the first frame of the huge page that this later frame belongs to.
    fn first_of(&self, frame: u64) -> Result<(u64, bool), String> {
        let look = |frames| {
            let from = frame.saturating_sub(frames);
            let flags = self.read(&self.flags, from, frame - from, "kpageflags")?;
            let place = flags.iter().rposition(|flags| flags & TAIL == 0);
            Ok::<_, String>((from, flags, place))
        };
        let mut found = look(USUAL)?;
        if found.2.is_none() {
            found = look(LARGEST)?;
        }
        let (from, flags, Some(place)) = found else { return Ok((HUGETLB, false)) };
        let first = from + place as u64;
        let word = self.read(&self.bitmap, first / 64, 1, "page_idle")?[0];
        Ok((flags[place], word >> (first % 64) & 1 != 0))
    }

    /// Reads words of a file.
    fn read(&self, file: &File, first: u64, count: u64, name: &str) -> Result<Vec<u64>, String> {
        let mut bytes = vec![0; 8 * count as usize];
        let mut at = 0;
        while at < bytes.len() {
            match file.read_at(&mut bytes[at..], 8 * first + at as u64) {
                Ok(0) => break,
                Ok(read) => at += read,
                Err(error) if is_end(&error) => break,
                Err(error) => return Err(format!("{name}: {error}")),
            }
        }
        Ok(numbers(&bytes).collect())
    }
}

/// Returns whether the error says that memory ends there, or within the last word: such a word can
/// be neither read nor written, and has no mark.
fn is_end(error: &io::Error) -> bool {
    error.kind() == ErrorKind::WriteZero || error.raw_os_error() == Some(libc::ENXIO)
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::find::tests::FakeProc;
    use std::collections::BTreeMap;

    /// A process whose pages have these frames, on a machine whose frames have these flags.
    fn host(frames: &[u64], flags: &BTreeMap<u64, u64>) -> FakeProc {
        let host = FakeProc::new();
        let bytes = |words: &mut dyn Iterator<Item = u64>| {
            words.flat_map(u64::to_ne_bytes).collect::<Vec<u8>>()
        };
        let end = page() * frames.len() as u64;
        host.write(
            "proc/7/maps",
            &format!("0-{end:x} rw-p 0 00:00 0\n{end:x}-ffff000 r--p 0 0 0\n"),
        );
        let entry = |frame: &u64| if *frame == 0 { 0 } else { PRESENT | frame };
        let all = (0..2048).map(|frame| flags.get(&frame).copied().unwrap_or(LRU));
        for (path, bytes) in [
            ("proc/7/pagemap", bytes(&mut frames.iter().map(entry))),
            ("proc/kpageflags", bytes(&mut { all })),
            (BITMAP, bytes(&mut std::iter::repeat_n(0, 32))),
        ] {
            host.write(path, "");
            std::fs::write(host.files().0.join(path), bytes).unwrap();
        }
        host
    }

    fn pages(seen: UsedBytes) -> (u64, u64) {
        (seen.used / page(), seen.all / page())
    }

    #[test]
    fn pages_that_kept_their_mark_were_not_used() {
        let frames = [70, 5, 0, 71, 72, 200];
        let host = host(&frames, &BTreeMap::from([(200, HUGETLB)]));
        let idle = Idle::open(&host.files(), 7).unwrap();
        assert_eq!(pages(idle.look(&host.files()).unwrap()), (4, 4));
        idle.make(&host.files()).unwrap();
        assert_eq!(pages(idle.look(&host.files()).unwrap()), (0, 4));
        let mut words = idle.read(&idle.bitmap, 0, 4, "").unwrap();
        assert_eq!(words, [1 << 5, 0b111 << 6, 0, 1 << 8]);
        // Another process uses one.
        words[1] &= !(1 << 7);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        idle.bitmap.write_all_at(&bytes, 0).unwrap();
        assert_eq!(pages(idle.look(&host.files()).unwrap()), (1, 4));
    }

    #[test]
    fn a_huge_page_has_its_first_frames_mark_at_any_start_of_a_run() {
        let frames: Vec<u64> = (1024..1536).collect();
        let flags = (1025..1536).map(|frame| (frame, TAIL)).collect();
        let host = host(&frames, &flags);
        let idle = Idle::open(&host.files(), 7).unwrap();
        // The kernel marks no later frames, either.
        idle.bitmap.write_all_at(&1u64.to_ne_bytes(), 1024 / 64 * 8).unwrap();
        assert_eq!(pages(idle.look(&host.files()).unwrap()), (0, 512));
        assert_eq!(idle.first_of(1400), Ok((LRU, true)));
        idle.bitmap.write_all_at(&0u64.to_ne_bytes(), 1024 / 64 * 8).unwrap();
        assert_eq!(pages(idle.look(&host.files()).unwrap()), (512, 512));
    }

    #[test]
    fn marks_and_flags_that_are_refused_are_no_use_of_all_pages() {
        let host = host(&[70, 5], &BTreeMap::new());
        let mut idle = Idle::open(&host.files(), 7).unwrap();
        let file = |path: &str| File::open(host.files().0.join(path)).unwrap();
        idle.bitmap = file(BITMAP);
        let refused = idle.make(&host.files()).unwrap_err();
        assert!(refused.starts_with("page_idle: "), "not opened for writes: {refused}");
        // A folder, as root may read any file.
        idle.flags = file("proc/7");
        let refused = idle.look(&host.files()).unwrap_err();
        assert!(refused.starts_with("kpageflags: "), "{refused}");
        for (error, end) in [(libc::ENXIO, true), (libc::EPERM, false), (libc::EIO, false)] {
            assert_eq!(is_end(&io::Error::from_raw_os_error(error)), end);
        }
    }

    #[test]
    fn hidden_frame_numbers_are_reported() {
        let host = host(&[0], &BTreeMap::new());
        std::fs::write(host.files().0.join("proc/7/pagemap"), PRESENT.to_ne_bytes()).unwrap();
        let idle = Idle::open(&host.files(), 7).unwrap();
        assert!(idle.make(&host.files()).unwrap_err().contains("hides"));
    }
}
