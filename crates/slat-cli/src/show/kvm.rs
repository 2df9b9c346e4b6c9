//! Reads the tables that KVM has for a guest on arm64: `stage2_page_tables` in debugfs, since Linux
//! 6.12.
//!
//! A line has a range, its size, the level, and flags if the range has leaves; see
//! `arch/arm64/kvm/ptdump.c`. It has neither the host address of a leaf nor its dirty state.

use super::dump::{Dump, Rights, Run};
use anyhow::{Context, bail};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Folder of debugfs that has KVM's guests.
pub const GUESTS: &str = "sys/kernel/debug/kvm";
const FILE: &str = "stage2_page_tables";

/// Reads the tables of a guest that runs on this host. `which` is its name in debugfs; it may be
/// `None` if there is only one guest.
///
/// # Errors
/// Returns an error if the kernel shows no tables, if `which` does not name exactly one guest, or
/// if the text cannot be parsed.
pub fn read(root: &Path, which: Option<&str>, page: u64) -> anyhow::Result<Dump> {
    let folder = root.join(GUESTS);
    let entries = fs::read_dir(&folder).with_context(|| {
        format!(
            "cannot look into {}; it needs root, and debugfs (mount -t debugfs none \
             /sys/kernel/debug)",
            folder.display()
        )
    })?;
    let names: Result<Vec<_>, _> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let names = names.with_context(|| folder.display().to_string())?.into_iter();
    // One that cannot be looked at is named, and its error told.
    let has_file = |name: &String| {
        let there = fs::metadata(folder.join(name).join(FILE)).map_err(|error| error.kind());
        !matches!(there, Err(ErrorKind::NotFound | ErrorKind::NotADirectory))
    };
    let mut guests: Vec<String> =
        names.filter_map(|name| name.into_string().ok()).filter(has_file).collect();
    guests.sort();
    let guest = match (which, &guests[..]) {
        (_, []) => bail!(
            "no guest below {} has a {FILE}: that takes a guest that runs, on arm64, with Linux \
             6.12 or later built with CONFIG_PTDUMP_STAGE2_DEBUGFS",
            folder.display()
        ),
        (Some(which), _) if guests.iter().any(|guest| guest == which) => which,
        (Some(which), _) => bail!("no guest {which} runs here; there are {}", guests.join(", ")),
        (None, [one]) => one,
        (None, _) => bail!("several guests run here; name one: --kvm {}", guests.join(", --kvm ")),
    };
    let file = folder.join(guest).join(FILE);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    parse(&text, page).map_err(|why| anyhow::anyhow!("{}: {why}", file.display()))
}

/// Parses the text of `stage2_page_tables`, from a host with pages of `page` bytes.
///
/// # Errors
/// Returns an error for another text, for ranges that do not consist of leaves of that page size,
/// and for a text of which a part is missing: a last line without its newline, ranges that do not
/// follow each other from 0, or an end where no address space ends.
pub fn parse(text: &str, page: u64) -> Result<Dump, String> {
    let mut dump = Dump::new("KVM, arm64", page);
    let mut end = None;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let at = |why| format!("line {}: {why}", number + 1);
        let whole = line.ends_with('\n');
        let line = line.trim();
        // `---[ Guest IPA ]---`
        if line.is_empty() || line.starts_with("---[") {
            continue;
        }
        let (start, next, run) = leaves(line, page).map_err(at)?;
        if !whole {
            return Err(at(format!("`{line}` has no newline: the text is cut")));
        }
        let before = end.unwrap_or(0);
        if start != before {
            return Err(at(format!(
                "{start:#x} does not follow {before:#x}: the kernel prints every range, holes too, \
                 so the text is incomplete or mixed"
            )));
        }
        end = Some(next);
        run.into_iter().for_each(|run| dump.push(run));
    }
    let Some(end) = end else { return Err("no line of it is one of a page table".to_owned()) };
    // The tables begin at 0 and cover an address space, whose size is a power of two.
    if !end.is_power_of_two() {
        return Err(format!("it ends at {end:#x}, where no address space ends: the text is cut"));
    }
    dump.check()?;
    Ok(dump)
}

/// Parses a line: its start, its end, and its leaves, which a hole does not have.
fn leaves(line: &str, page: u64) -> Result<(u64, u64, Option<Run>), String> {
    let mut words = line.split_whitespace();
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let range = words.next().and_then(|word| {
        let (start, end) = word.split_once('-')?;
        Some((address(start)?, address(end)?))
    });
    let (Some((start, end)), Some(_size)) = (range, words.next()) else {
        return Err(format!("`{line}` is no line of a page table"));
    };
    if end <= start {
        return Err(format!("{start:#x}-{end:#x} is no range"));
    }
    // A hole above the first table has no level.
    let level = words.next();
    let flags: Vec<&str> = words.collect();
    if flags.is_empty() || flags.contains(&"F") {
        return Ok((start, end, None));
    }
    let size = match level {
        Some("3" | "PTE") => page,
        Some("2" | "PMD") => page * page / 8,
        Some("1" | "PUD") if page == 4096 => 1 << 30,
        level => return Err(format!("leaves at level {}", level.unwrap_or("?"))),
    };
    let bytes = end - start;
    let count = bytes / size;
    if start % size != 0 || bytes % size != 0 {
        return Err(format!(
            "{start:#x}-{end:#x} is no range of {}; the host has pages of another size (--page)",
            slat_lab::size::Size(size)
        ));
    }
    let mut run = Run {
        gpa: start,
        hpa: None,
        size,
        count,
        rights: Rights { read: false, write: false, execute: 'x' },
        accessed: false,
        dirty: None,
    };
    for flag in flags {
        match flag {
            "R" => run.rights.read = true,
            "W" => run.rights.write = true,
            "AF" => run.accessed = true,
            // The first kernels that have this file print `X` if the bit "execute never" is set.
            "X" | "XN" | "NX" | "PXNUXN" => run.rights.execute = '-',
            "PXNux" => run.rights.execute = 'u',
            // A part of `px UXN`.
            "UXN" => run.rights.execute = 'k',
            "px" | "ux" | "x" | "BLK" | "CON" => {}
            other => return Err(format!("`{other}` is no flag that is known")),
        }
    }
    Ok((start, end, Some(run)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text as such a kernel prints it, with holes, a device page and blocks.
    const TEXT: &str = "\
---[ Guest IPA ]---
0x0000000000000000-0x0000000001000000          16M 2
0x0000000001000000-0x0000000001020000         128K 3
0x0000000001020000-0x0000000001021000           4K 3   R W X AF    
0x0000000001021000-0x0000000001200000        1916K 3
0x0000000001200000-0x0000000080000000        2030M 1
0x0000000080000000-0x0000000081200000          18M 2   R W   AF BLK
0x0000000081200000-0x0000000081a00000           8M 2   R   X AF BLK
0x0000000081a00000-0x00000000c0000000         998M 2
0x00000000c0000000-0x0000000100000000           1G 1   R W X    BLK
0x0000000100000000-0x0000010000000000        1020G 0
";

    #[test]
    fn leaves_are_read_and_holes_left_out() {
        let shown = |run: &Run| {
            let used = if run.accessed { " A" } else { "" };
            format!("{:#x} {} x {:#x} {}{used}", run.gpa, run.count, run.size, run.rights)
        };
        let dump = parse(TEXT, 4096).unwrap();
        let leaves: Vec<_> = dump.leaves.iter().map(shown).collect();
        let wanted = [
            "0x1020000 1 x 0x1000 rw- A",
            "0x80000000 9 x 0x200000 rwx A",
            "0x81200000 4 x 0x200000 r-- A",
            "0xc0000000 1 x 0x40000000 rw-",
        ];
        assert_eq!(leaves, wanted);
        assert!(dump.leaves.iter().all(|run| run.dirty.is_none() && run.hpa.is_none()));
    }

    #[test]
    fn dumps_of_later_kernels_show_which_privilege_levels_may_execute() {
        let rights = |flags: &str| {
            let text = format!("0x0-0x200000 2M 2\n0x200000-0x400000  2M 2  {flags}\n");
            parse(&text, 4096).unwrap().leaves.first().map(|run| run.rights.to_string())
        };
        for (flags, shown) in [
            ("  R W px ux  AF BLK", "rwx"),
            ("  R W PXNux  AF BLK", "rwu"),
            ("  R   PXNUXN AF BLK", "r--"),
            ("  R   px UXN    BLK", "r-k"),
        ] {
            assert_eq!(rights(flags).as_deref(), Some(shown), "{flags}");
        }
        assert_eq!(rights("F     px ux"), None, "an entry that is not valid is no leaf");
    }

    #[test]
    fn the_page_size_of_the_host_decides_what_a_level_is() {
        let text = "0x0-0x4000000  64M 2   R W   AF BLK\n";
        assert_eq!(parse(text, 16384).unwrap().leaves[0].size, 32 << 20);
        assert!(parse(text, 65536).unwrap_err().contains("--page"));
    }

    #[test]
    fn something_else_is_refused_with_its_line() {
        for (text, why) in [
            ("", "no line"),
            ("hello\n", "line 1"),
            ("---[ Guest IPA ]---\n0x0-0x1000 4K 3 R W Q AF\n", "line 2: `Q`"),
            ("0x0-0x1000 4K 0 R W AF\n", "level 0"),
        ] {
            let error = parse(text, 4096).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_text_of_which_a_part_is_missing_is_refused() {
        let block = "0x0-0x200000 2M 2 R W px ux AF BLK\n";
        let whole = format!("{block}0x200000-0x40000000 1022M 2\n");
        assert_eq!(parse(&whole, 4096).unwrap().leaves.len(), 1);
        // Each line but the last, and each byte of the last that can be missing.
        for end in 1..whole.len() {
            let error = parse(&whole[..end], 4096);
            assert!(error.is_err() || whole[..end] == *block, "{:?}", &whole[..end]);
        }
        for (rest, why) in [
            ("0x200000-0x3fe00000 1020M 2\n", "ends at 0x3fe00000"),
            ("0x200000-0x40000000 1022M 2", "no newline"),
            ("0x600000-0x40000000 1018M 2\n", "does not follow"),
            ("0x0-0x200000 2M 2 R W px ux AF BLK\n0x200000-0x40000000 1022M 2\n", "not follow"),
        ] {
            let error = parse(&format!("{block}{rest}"), 4096).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_guest_is_named_where_there_are_several() {
        let root = tempfile::tempdir().unwrap();
        let refused = |which| format!("{:#}", read(root.path(), which, 4096).unwrap_err());
        assert!(refused(None).contains("root"));
        fs::create_dir_all(root.path().join(GUESTS).join("12-3")).unwrap();
        assert!(refused(None).contains("CONFIG_PTDUMP_STAGE2_DEBUGFS"));
        let add = |name: &str| {
            let folder = root.path().join(GUESTS).join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(FILE), TEXT).unwrap();
        };
        // A file of KVM's own beside the guests' folders; a guest that cannot be looked at.
        fs::write(root.path().join(GUESTS).join("exits"), "0\n").unwrap();
        let hidden = root.path().join(GUESTS).join("9-9");
        std::os::unix::fs::symlink("9-9", &hidden).unwrap();
        assert!(refused(None).contains("9-9/stage2_page_tables: Too many levels"));
        fs::remove_file(hidden).unwrap();
        add("12-3");
        assert_eq!(read(root.path(), None, 4096).unwrap().leaves.len(), 4);
        add("15-4");
        assert!(refused(None).contains("--kvm 12-3, --kvm 15-4"));
        assert!(refused(Some("9-9")).contains("12-3, 15-4"));
        assert!(read(root.path(), Some("15-4"), 4096).is_ok());
    }
}
