//! Counts of the kernel's events, by its tracer (Documentation/trace/events.rst).
//!
//! The events are enabled in an instance of the tracer of their own, so that other users of the
//! tracer are not disturbed. This needs root.

use std::path::PathBuf;

/// Returns the directory of the tracer, if this process may see it.
pub(crate) fn root() -> Option<PathBuf> {
    let roots = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
    roots.into_iter().map(PathBuf::from).find(|root| root.join("instances").exists())
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
        let instance = root()?.join("instances").join(format!("slat-{}", std::process::id()));
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
    let name = |line: &&str| line.split(": ").nth(1) == Some(event);
    Some(lines.filter(name).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_by_their_name() {
        let text = "# tracer: nop\n#\n# entries-in-buffer/entries-written: 3/3   #P:2\n#\n\
            vcpu0-142 [001] .....  1.5: kvm_toggle_cache: VCPU op: was on, now off\n\
            vcpu1-143 [000] d.h2.  1.6: kvm_toggle_cache: VCPU op: was off, now on\n\
            vcpu1-143 [000] d.h2.  1.7: kvm_set_way_flush: S/W flush\n";
        assert_eq!((count(text, "kvm_toggle_cache"), count(text, "kvm_entry")), (Some(2), Some(0)));
        let overwritten = text.replace("3/3", "3/4");
        assert_eq!(count(&overwritten, "kvm_toggle_cache"), None);
    }
}
