//! The kernel's tracepoints: their numbers and the offsets of their fields. Both differ between
//! kernels, so they are read from tracefs.

use crate::procfs::Files;
use crate::watch::debugfs;
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// Where tracefs is usually mounted.
const USUAL: [&str; 2] = ["sys/kernel/tracing", "sys/kernel/debug/tracing"];

/// How far the kernel is locked down, if securityfs is mounted.
const LOCKDOWN: &str = "sys/kernel/security/lockdown";

/// Returns why tracefs has no readable folder of events. `lockdown` is the kernel's level of
/// it, if that is known.
fn no_events(error: &std::io::Error, lockdown: Option<&str>) -> String {
    // The kernel then creates no file in tracefs, or refuses to open it.
    let may_be = [ErrorKind::NotFound, ErrorKind::PermissionDenied].contains(&error.kind());
    let why = match lockdown {
        Some("confidentiality") if may_be => {
            "the kernel is locked down for confidentiality (/sys/kernel/security/lockdown)"
        }
        None if may_be => "the kernel may be locked down for confidentiality",
        _ => return format!("tracefs shows no events: {error}"),
    };
    format!("tracefs shows no events: {why}")
}

/// The folder of events in tracefs.
#[derive(Debug)]
pub(crate) struct Tracefs {
    events: PathBuf,
    /// Keeps this process's own mount.
    _mount: Option<OwnedFd>,
}

/// An event: its number and its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tracepoint {
    pub number: u64,
    fields: Vec<(String, Field)>,
}

/// Events whose arguments are the fields of their records, in this order (`TP_PROTO` in Linux's
/// include/trace/events/kvm.h and arch/arm64/kvm/trace_arm.h).
const ARGUMENTS: [(&str, &[&str]); 5] = [
    ("kvm_exit", &["ret", "esr_ec", "vcpu_pc"]),
    ("kvm_guest_fault", &["vcpu_pc", "hsr", "hxfar", "ipa"]),
    ("kvm_unmap_hva_range", &["start", "end"]),
    ("kvm_age_hva", &["start", "end"]),
    ("kvm_test_age_hva", &["hva"]),
];

/// Offset and size in bytes of a field in an event's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Field {
    pub offset: i16,
    pub size: u8,
}

impl Tracefs {
    /// Finds tracefs, or mounts it for this process alone.
    pub fn open() -> Result<Self, String> {
        let files = Files::here();
        if let Some(usual) = Self::usual(&files)? {
            return Ok(usual);
        }
        let mount = debugfs::private("tracefs", MountAttrFlags::MOUNT_ATTR_RDONLY);
        let mount = mount.map_err(|error| match error {
            Errno::PERM => {
                "tracefs is not mounted, and to mount it takes root: run as root".to_owned()
            }
            Errno::NODEV => "this kernel has no tracefs".to_owned(),
            error => format!("tracefs is not mounted, and cannot be: {error}"),
        })?;
        let events = PathBuf::from(format!("/proc/self/fd/{}/events", mount.as_raw_fd()));
        match fs::read_dir(&events) {
            Ok(_) => Ok(Self { events, _mount: Some(mount) }),
            Err(error) => Err(no_events(&error, files.choice(LOCKDOWN).as_deref())),
        }
    }

    /// Finds tracefs at its usual places among the files of a host, and mounts nothing.
    pub fn usual(files: &Files<'_>) -> Result<Option<Self>, String> {
        for usual in USUAL {
            let events = files.0.join(usual).join("events");
            match fs::read_dir(&events) {
                Ok(_) => return Ok(Some(Self { events, _mount: None })),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err("tracefs is root's: run as root".to_owned());
                }
                // Wherever it is mounted, it has no folder then.
                Err(error) if files.choice(LOCKDOWN).as_deref() == Some("confidentiality") => {
                    return Err(no_events(&error, Some("confidentiality")));
                }
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// Uses events in a made-up folder.
    #[cfg(test)]
    pub fn made(events: &std::path::Path) -> Self {
        Self { events: events.to_owned(), _mount: None }
    }

    /// Reads an event, such as `kvm/kvm_exit`.
    pub fn event(&self, name: &str) -> Result<Tracepoint, String> {
        let text = fs::read_to_string(self.events.join(name).join("format"));
        match text {
            Ok(text) => parse(&text)
                .ok_or_else(|| format!("the form of the tracepoint {name} is not known here")),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let folder = name.split('/').next().unwrap_or_default();
                Err(match self.events.join(folder).exists() {
                    true => format!("this kernel's KVM has no tracepoint {name}"),
                    false => format!(
                        "this kernel has no tracepoints of {folder}: its module is not loaded, or \
                         was built without"
                    ),
                })
            }
            Err(error) => Err(format!("the tracepoint {name} cannot be read: {error}")),
        }
    }
}

impl Tracepoint {
    /// Returns where a field lies.
    pub fn field(&self, name: &str) -> Result<Field, String> {
        let found = self.fields.iter().find(|(field, _)| field == name);
        found
            .map(|(_, field)| *field)
            .ok_or_else(|| format!("the tracepoint has no field {name} in this kernel"))
    }

    /// Returns the event `name` with its fields where a program finds them that is called with the
    /// arguments, each a word; `None` if its arguments are not known to be its fields.
    pub fn arguments(&self, name: &str) -> Option<Self> {
        let (_, known) = ARGUMENTS.iter().find(|(event, _)| *event == name)?;
        let own = self.fields.iter().filter(|(field, _)| !field.starts_with("common_"));
        if !own.clone().map(|(field, _)| &**field).eq(known.iter().copied()) {
            return None;
        }
        let word = |(place, (name, field)): (usize, &(String, Field))| {
            // The lower bytes are the first ones.
            let little = cfg!(target_endian = "little");
            let offset = (8 * place + if little { 0 } else { 8 - field.size as usize }) as i16;
            (name.clone(), Field { offset, size: field.size })
        };
        let fields = own.enumerate().map(word).collect();
        Some(Self { number: self.number, fields })
    }
}

/// Parses an event's format file.
pub(crate) fn parse(text: &str) -> Option<Tracepoint> {
    let mut number = None;
    let mut fields = Vec::new();
    for line in text.lines() {
        if let Some(id) = line.strip_prefix("ID: ") {
            number = Some(id.trim().parse().ok()?);
        }
        let Some(declaration) = line.trim().strip_prefix("field:") else { continue };
        let mut parts = declaration.split(';').map(str::trim);
        let name = parts.next()?.split_whitespace().next_back()?;
        let mut value = |key: &str| parts.next()?.strip_prefix(key)?.parse::<u32>().ok();
        let (offset, size) = (value("offset:")?, value("size:")?);
        // Strings and arrays are longer than any field that the programs read.
        if let (Ok(offset), Ok(size @ (1 | 2 | 4 | 8))) =
            (i16::try_from(offset), u8::try_from(size))
        {
            fields.push((name.to_owned(), Field { offset, size }));
        }
    }
    Some(Tracepoint { number: number?, fields })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The format in Linux 6.18, without its `print fmt`.
    pub const EXIT: &str = "name: kvm_exit
ID: 103
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;
\tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u32 isa;\toffset:24;\tsize:4;\tsigned:0;
\tfield:u64 info1;\toffset:32;\tsize:8;\tsigned:0;
\tfield:unsigned int vcpu_id;\toffset:56;\tsize:4;\tsigned:0;
\tfield:char comm[16];\toffset:64;\tsize:16;\tsigned:0;
";

    #[test]
    fn fields_lie_where_the_kernel_says_and_numbers_are_its_own() {
        let exit = parse(EXIT).unwrap();
        assert_eq!(exit.number, 103);
        assert_eq!(exit.field("info1"), Ok(Field { offset: 32, size: 8 }));
        assert_eq!(exit.field("vcpu_id"), Ok(Field { offset: 56, size: 4 }));
        assert!(exit.field("esr_ec").unwrap_err().contains("no field esr_ec"));
        assert_eq!(parse("name: x\n"), None);
        assert_eq!(parse("ID: x\n"), None);
        assert_eq!(parse("ID: 1\n\tfield:int a;\toffset:x;\n"), None);
    }

    #[test]
    fn arguments_are_words_in_field_order_where_both_are_known() {
        let arm = parse(
            "ID: 7\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\n\tfield:int ret;\t\
             offset:8;\tsize:4;\n\tfield:unsigned int esr_ec;\toffset:12;\tsize:4;\n\tfield:\
             unsigned long vcpu_pc;\toffset:16;\tsize:8;\n",
        );
        let arm = arm.unwrap();
        let words = arm.arguments("kvm_exit").unwrap();
        assert_eq!(words.field("esr_ec"), Ok(Field { offset: 8, size: 4 }));
        assert_eq!(words.field("vcpu_pc"), Ok(Field { offset: 16, size: 8 }));
        assert!(words.field("common_type").is_err());
        // Another event, and x86's fields, which KVM gathers for the record.
        assert_eq!(arm.arguments("kvm_guest_fault"), None);
        assert_eq!(parse(EXIT).unwrap().arguments("kvm_exit"), None);
    }

    #[test]
    fn a_kernel_that_is_locked_down_is_said_to_be() {
        let missing = std::io::Error::from(ErrorKind::NotFound);
        let locked = no_events(&missing, Some("confidentiality"));
        assert!(locked.contains("is locked down for confidentiality"), "{locked}");
        assert!(no_events(&missing, None).contains("may be locked down"));
        for open in ["none", "integrity"] {
            let other = no_events(&missing, Some(open));
            assert!(!other.contains("locked"), "{other}");
        }
    }

    #[test]
    fn a_kernel_without_kvm_differs_from_one_without_the_event() {
        let folder = tempfile::tempdir().unwrap();
        let tracefs = Tracefs::made(folder.path());
        assert!(tracefs.event("kvm/kvm_exit").unwrap_err().contains("not loaded"));
        fs::create_dir_all(folder.path().join("kvm/kvm_exit")).unwrap();
        assert!(tracefs.event("kvm/kvm_entry").unwrap_err().contains("no tracepoint"));
        fs::write(folder.path().join("kvm/kvm_exit/format"), EXIT).unwrap();
        assert_eq!(tracefs.event("kvm/kvm_exit").unwrap().number, 103);
    }
}
