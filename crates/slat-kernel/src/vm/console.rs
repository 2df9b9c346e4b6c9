//! What a kernel says on its console when something is wrong: an Oops, a BUG, a warning, a report
//! of lockdep or of a sanitizer, a stall.

/// A complaint of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// Its line, and the place in the code if the console has it.
    pub cause: String,
    /// The console from shortly before that line on.
    pub context: String,
}

/// Texts by which lines of serious complaints begin.
const SERIOUS: [&str; 7] = [
    "kernel BUG at ",
    "Unable to handle kernel ",
    "Internal error: ",
    "Oops: ",
    "general protection fault",
    "BUG: ",
    "Kernel panic - not syncing: ",
];

/// Texts that lines about a stall have.
const STALLS: [&str; 4] =
    ["self-detected stall", "detected stalls on", "blocked for more than", "watchdog: BUG: "];

/// Words by which a line that names the place in the code begins.
const PLACES: [&str; 2] = ["RIP: ", "pc : "];

/// A warning of code; other warnings are reports of lockdep, and of RCU's checks.
const WARNING: &str = "WARNING: ";

/// What Linux says on Power where QEMU's machine has an empty NVRAM.
const NO_NVRAM: &str = "WARNING: nvram corruption detected";

/// Lines that are searched for the place in the code.
const NEAR: usize = 40;

/// Lines of the console that an error shows before the complaint, and from it on.
const SHOWN: (usize, usize) = (4, 34);

/// Returns a line of the console without the time and the thread that the kernel put before it.
fn text(line: &str) -> &str {
    let mut rest = line.trim();
    while let Some((_, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        rest = after.trim_start();
    }
    rest
}

/// Returns the place of a warning: `at FILE:LINE`.
fn warned(text: &str) -> Option<&str> {
    let rest = text.strip_prefix(WARNING)?;
    let rest = if rest.starts_with("CPU: ") { rest.split_once(" at ")?.1 } else { rest };
    // A report has words here, not the path of a source.
    let place = rest.split(' ').next()?;
    let (file, line) = place.rsplit_once(':')?;
    (file.ends_with(".c") || file.ends_with(".h")).then_some(())?;
    line.parse::<u32>().ok().map(|_| place)
}

/// Returns whether what a line says makes all that follows worthless. A warning does so if it is
/// KVM's.
fn is_serious(line: &str) -> bool {
    let text = text(line);
    SERIOUS.iter().any(|begin| text.starts_with(begin))
        || STALLS.iter().any(|part| text.contains(part))
        || (text.starts_with(WARNING)
            && !text.starts_with(NO_NVRAM)
            && warned(text).is_none_or(|file| file.contains("/kvm/")))
}

/// Returns whether a part of a console has a serious complaint.
pub fn is_wrong(console: &str) -> bool {
    console.lines().any(is_serious)
}

/// Returns the first serious complaint on a console.
pub fn complaint(console: &str) -> Option<Complaint> {
    let lines: Vec<&str> = console.lines().map(str::trim_end).collect();
    let at = lines.iter().position(|line| is_serious(line))?;
    let near = lines[at..].iter().take(NEAR).map(|line| text(line));
    let mut places = near.filter_map(|l| PLACES.iter().find_map(|begin| l.strip_prefix(begin)));
    let place = places.next();
    // x86 names the segment first.
    let place = place.map(|place| place.trim_start_matches("0010:").trim());
    let mut cause = text(lines[at]).to_owned();
    if let Some(place) = place.filter(|place| !cause.contains(*place)) {
        cause += &format!(" (in {})", place.split(" (").next().unwrap_or(place));
    }
    let (before, after) = SHOWN;
    let shown = &lines[at.saturating_sub(before)..lines.len().min(at + after)];
    Some(Complaint { cause, context: shown.join("\n  ") })
}

/// Returns warnings of other code than KVM's, each once.
pub fn warnings(console: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for place in console.lines().filter_map(|line| warned(text(line))) {
        if !place.contains("/kvm/") && !found.iter().any(|other| other == place) {
            found.push(place.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_complaint_is_the_cause_and_has_its_place() {
        let arm = "[    0.5] Freeing memory\r\n[    1.2] ------------[ cut here ]------------\r\n\
                   [    1.2] kernel BUG at arch/arm64/kvm/arm.c:12!\r\n\
                   [    1.2] Internal error: Oops - BUG: 00000000f2000800 [#1] SMP\r\n\
                   [    1.2] pc : kvm_vm_ioctl+0x10/0x20\r\n[    1.2] lr : other+0x1/0x2\r\n\
                   [    1.3] Kernel panic - not syncing: Oops - BUG: Fatal exception\r\n";
        let found = complaint(arm).unwrap();
        let cause = "kernel BUG at arch/arm64/kvm/arm.c:12! (in kvm_vm_ioctl+0x10/0x20)";
        assert_eq!(found.cause, cause);
        assert!(found.context.starts_with("[    0.5]") && found.context.ends_with("exception"));
        let x86 = "[ 1.0] BUG: kernel NULL pointer dereference, address: 0000000000000008\n\
                   [ 1.0] RIP: 0010:tdp_mmu_map+0x4c/0x70\n[ 1.0] RIP: 0033:0x4\n";
        let cause = complaint(x86).unwrap().cause;
        assert!(cause.ends_with("0000000000000008 (in tdp_mmu_map+0x4c/0x70)"), "{cause}");
    }

    #[test]
    fn kvm_warnings_and_lockdep_reports_are_serious_others_are_not() {
        let other = "[    1.0] WARNING: CPU: 0 PID: 1 at mm/slab.c:7 kfree+0x1/0x2\n";
        assert!(!is_wrong(other));
        assert_eq!(warnings(&other.repeat(2)), ["mm/slab.c:7"]);
        for line in [
            "[    1.0] WARNING: CPU: 1 PID: 9 at arch/arm64/kvm/mmu.c:99 f+0x1/0x2",
            "[    1.0][   T12] WARNING: virt/kvm/kvm_main.c:7 at f+0x1/0x2, CPU#1: slat/9",
            "[    1.0] WARNING: possible circular locking dependency detected",
            "WARNING: suspicious RCU usage",
            "[    2.0] rcu: INFO: rcu_sched self-detected stall on CPU",
            "[    2.0] BUG: KASAN: slab-use-after-free in f+0x1/0x2",
        ] {
            assert!(is_wrong(line), "{line}");
            assert!(warnings(line).is_empty(), "{line}");
        }
        assert!(!is_wrong("[    0.3] WARNING: nvram corruption detected: 0-length partition"));
        for line in ["slat: WARNING is no word of a kernel", "[ 0.1] Booting Linux", ""] {
            assert!(!is_wrong(line), "{line}");
        }
    }
}
