//! Kernel configurations with the options that are needed, and no others.

use crate::vm::Architecture;

/// Options of every architecture.
const COMMON: &str = include_str!("../config/common.config");

/// Options that a kernel must have: a tree that lacks one of them is not built.
pub const NEEDED: [&str; 6] = [
    "CONFIG_KVM=y",
    "CONFIG_BLK_DEV_INITRD=y",
    "CONFIG_SERIAL_8250_CONSOLE=y",
    "CONFIG_DEVTMPFS=y",
    "CONFIG_TRANSPARENT_HUGEPAGE=y",
    "CONFIG_PROC_PAGE_MONITOR=y",
];

/// Sets of more options, by name.
pub const SETS: [(&str, &str); 5] = [
    ("checked", include_str!("../config/checked.config")),
    ("kcsan", include_str!("../config/kcsan.config")),
    ("private", include_str!("../config/private.config")),
    ("16k", include_str!("../config/16k.config")),
    ("64k", include_str!("../config/64k.config")),
];

/// Returns the options to set, for `make allnoconfig` with `KCONFIG_ALLCONFIG`. Of an option that
/// occurs twice the last one counts.
pub fn options(arch: Architecture, more: &str) -> String {
    let own = match arch {
        Architecture::X86_64 => include_str!("../config/x86_64.config"),
        Architecture::Aarch64 => include_str!("../config/aarch64.config"),
        Architecture::Riscv64 => include_str!("../config/riscv64.config"),
        Architecture::Ppc64le => include_str!("../config/ppc64le.config"),
    };
    format!("{COMMON}{own}{more}")
}

/// Returns options that a configuration lacks, among those that are needed and those asked for.
pub fn lacking<'a>(config: &str, more: &'a str) -> Vec<&'a str> {
    let asked = more.lines().map(str::trim).filter(|line| line.ends_with("=y"));
    let wanted = NEEDED.into_iter().chain(asked);
    wanted.filter(|wanted| !config.lines().any(|line| line == *wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_an_option_or_says_why() {
        for arch in Architecture::ALL {
            let text = options(arch, "");
            let is_known = |line: &&str| {
                line.is_empty()
                    || line.starts_with('#')
                    || (line.starts_with("CONFIG_") && line.contains('='))
            };
            assert!(text.lines().all(|line| is_known(&line)), "{arch}");
            let mut options: Vec<_> = text.lines().filter(|l| l.starts_with("CONFIG_")).collect();
            let all = options.len();
            options.sort_unstable();
            options.dedup();
            assert_eq!(options.len(), all, "{arch}: an option is there twice");
            assert!(SETS.iter().all(|(_, text)| text.lines().all(|line| is_known(&line))));
        }
    }

    #[test]
    fn what_a_configuration_lacks_is_named() {
        let whole = NEEDED.join("\n");
        assert!(lacking(&whole, "").is_empty());
        assert_eq!(lacking(&whole.replace("CONFIG_KVM=y", "# none"), ""), ["CONFIG_KVM=y"]);
        assert_eq!(lacking(&whole, "# why\nCONFIG_PREEMPT=y\n"), ["CONFIG_PREEMPT=y"]);
    }
}
