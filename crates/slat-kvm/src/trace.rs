//! Counts of the kernel's events, by its tracer (Documentation/trace/events.rst).
//!
//! The events are enabled in an instance of the tracer of their own, so that other users of the
//! tracer are not disturbed. This needs root.

use crate::procfs::Files;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Returns the directory of the tracer.
///
/// # Errors
/// Why this process cannot use it.
pub(crate) fn root() -> Result<PathBuf, String> {
    below(Files::here())
}

pub(crate) fn below(files: Files<'_>) -> Result<PathBuf, String> {
    let mut denied = None;
    for root in ["sys/kernel/tracing", "sys/kernel/debug/tracing"] {
        let root = files.0.join(root);
        match std::fs::metadata(root.join("instances")) {
            Ok(_) => return Ok(root),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => denied = Some(format!("{}: {error}", root.display())),
        }
    }
    // Then the folder is there, and empty.
    if files.choice("sys/kernel/security/lockdown").as_deref() == Some("confidentiality") {
        return Err("the kernel is locked down (confidentiality)".to_owned());
    }
    Err(denied.unwrap_or_else(|| {
        "tracefs is not mounted (mount -t tracefs none /sys/kernel/tracing)".to_owned()
    }))
}

/// Events that are counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Events {
    instance: PathBuf,
}

impl Events {
    /// Starts to count. Returns `None` if this process may not trace, or if the kernel lacks an
    /// event.
    pub fn start(events: &[&str]) -> Option<Self> {
        let instance = root().ok()?.join("instances").join(format!("slat-{}", std::process::id()));
        std::fs::create_dir(&instance).ok()?;
        // From here on, dropping `this` removes the instance.
        let this = Self { instance };
        for event in events {
            let file = this.instance.join("events").join(event).join("enable");
            std::fs::write(file, "1").ok()?;
        }
        Some(this)
    }

    /// Returns how often an event occurred.
    pub fn count(&self, event: &str) -> Option<u64> {
        let text = crate::procfs::lossy(std::fs::read(self.instance.join("trace")).ok()?);
        count(&text, event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // If this fails, an unused instance stays until the next boot.
        let _ = std::fs::remove_dir(&self.instance);
    }
}

fn count(text: &str, event: &str) -> Option<u64> {
    // `# entries-in-buffer/entries-written: 5/5   #P:2`: if the kernel wrote more than it still
    // has, nobody knows how many of them were this event.
    let entries = text.lines().find_map(|line| line.strip_prefix("# entries-in-buffer/"));
    let entries = entries?.strip_prefix("entries-written:")?.split_whitespace().next()?;
    let (kept, written) = entries.split_once('/')?;
    if kept != written {
        return None;
    }
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    // The thread's name before it may have colons and blanks, and is shorter than this.
    let name = format!(": {event}: ");
    Some(lines.filter(|line| line.contains(&name)).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_by_their_name() {
        let text = "# tracer: nop\n#\n# entries-in-buffer/entries-written: 3/3   #P:2\n#\n\
            vcpu0-142 [001] .....  1.5: kvm_toggle_cache: VCPU op: was on, now off\n\
            of 7: 1-143 [000] d.h2.  1.6: kvm_toggle_cache: VCPU op: was off, now on\n\
            vcpu1-143 [000] d.h2.  1.7: kvm_set_way_flush: S/W flush\n";
        assert_eq!((count(text, "kvm_toggle_cache"), count(text, "kvm_entry")), (Some(2), Some(0)));
        let overwritten = text.replace("3/3", "3/4");
        assert_eq!(count(&overwritten, "kvm_toggle_cache"), None);
    }

    #[test]
    fn a_tracer_that_is_refused_is_not_said_to_be_unmounted() {
        let root = tempfile::tempdir().unwrap();
        let tracing = root.path().join("sys/kernel/tracing");
        let told = || below(Files(root.path())).unwrap_err();
        assert!(told().contains("not mounted"), "{}", told());
        std::fs::create_dir_all(tracing.parent().unwrap()).unwrap();
        // A file in the folder's place, as root may look into any folder.
        std::fs::write(&tracing, "").unwrap();
        assert!(told().contains("tracing: Not a directory"), "{}", told());
        std::fs::remove_file(&tracing).unwrap();
        let lockdown = root.path().join("sys/kernel/security");
        std::fs::create_dir_all(&lockdown).unwrap();
        std::fs::write(lockdown.join("lockdown"), "none integrity [confidentiality]\n").unwrap();
        std::fs::create_dir(&tracing).unwrap();
        assert!(told().contains("locked down"), "{}", told());
        std::fs::create_dir(tracing.join("instances")).unwrap();
        assert_eq!(below(Files(root.path())), Ok(tracing));
    }
}
