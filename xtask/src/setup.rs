//! What the tests need beyond a Rust toolchain and a linker.

use anyhow::{Context, bail};
use std::process::{Command, Stdio};

/// Components of the toolchain, with the command of cargo that each brings.
const COMPONENTS: [(&str, &str); 2] = [("rustfmt", "fmt"), ("clippy", "clippy")];

/// Installs all that is missing.
pub fn all() -> anyhow::Result<()> {
    for (component, _) in COMPONENTS {
        component_for(component)?;
    }
    println!("set up: everything that the tests need is there");
    Ok(())
}

/// Installs a component of the toolchain, if it is missing.
pub fn component_for(component: &str) -> anyhow::Result<()> {
    let command = COMPONENTS.iter().find(|(name, _)| *name == component);
    let (_, command) = command.with_context(|| format!("no component is called {component}"))?;
    if answers(Command::new(cargo()).args([command, "--version"])) {
        return Ok(());
    }
    println!("installing {component}");
    if answers(Command::new("rustup").args(["component", "add", component])) {
        return Ok(());
    }
    bail!("{component} is missing and `rustup component add {component}` did not install it")
}

/// The cargo that runs this, so that one toolchain does everything.
pub fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn answers(command: &mut Command) -> bool {
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
