//! What a watch says: to a Prometheus server that scrapes `slat watch --listen`, and of guests
//! whose stalls are made on purpose.

use crate::workspace::{Outcome, programs};
use crate::{emulators, in_ci, setup, target};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for the server to start and to scrape twice.
const LONGEST: Duration = Duration::from_secs(60);

/// A process that ends with this.
struct ChildProcess(Child);

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks metrics, and verdicts in an emulated machine.
pub fn test() -> anyhow::Result<Outcome> {
    match scraped()? {
        Outcome::Ran(_) => emulators::causes().map(|()| Outcome::Ran(Vec::new())),
        skipped => Ok(skipped),
    }
}

/// Lets a Prometheus server scrape a watch, and asks it what it understood.
fn scraped() -> anyhow::Result<Outcome> {
    match setup::package("prometheus", "prometheus") {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    }
    let slat = programs()?.join("slat");
    let folder = target().join("test-metrics");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let guest = Command::new(&slat)
        .args(["bench", "dirty-log", "-b", "16M", "-v", "1", "-r", "1", "--duration", "60s"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _guest = ChildProcess(guest.context("cannot start slat")?);
    let mut watch = Command::new(&slat);
    watch.args(["watch", "--listen=127.0.0.1:0", "--for", "10m"]).stdout(Stdio::null());
    let mut watch =
        ChildProcess(watch.stderr(Stdio::piped()).spawn().context("cannot start slat")?);
    let said = BufReader::new(watch.0.stderr.take().context("no stderr")?).lines().next();
    let said = said.context("the watch ended")??;
    let address =
        said.strip_prefix("metrics at http://").and_then(|it| it.strip_suffix("/metrics"));
    let server = server(&folder, address.with_context(|| said.clone())?)?;
    let up = asked(&server.1, "query?query=up%7Bjob%3D%22slat%22%7D == 1", "the watch is not up")?;
    println!("scraped: {}", up["data"]["result"][0]["metric"]["instance"]);
    asked(&server.1, "query?query=slat_watch_cpu_seconds_total > 0", "it has no CPU time")?;
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_ok() {
        let running = "query?query=rate(slat_guest_running_seconds_total[10s]) >= 0";
        let guest = asked(&server.1, running, "the guest has no rate")?;
        let labels = &guest["data"]["result"][0]["metric"];
        ensure!(labels["pid"].is_string() && labels["name"] == "slat", "its labels: {labels}");
    }
    let known = asked(&server.1, "metadata?metric=slat_watch_cpu_seconds", "it has no metadata")?;
    let known = &known["data"]["slat_watch_cpu_seconds"][0];
    ensure!(known["type"] == "counter" && known["unit"] == "seconds", "{known}");
    ensure!(known["help"].as_str().is_some_and(|help| !help.is_empty()), "{known}");
    Ok(Outcome::Ran(Vec::new()))
}

/// Starts a server that scrapes the address each second; returns its own address as well.
fn server(folder: &Path, scraped: &str) -> anyhow::Result<(ChildProcess, String)> {
    let config = format!(
        "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: slat\n    static_configs:\n\
         {:6}- targets: ['{scraped}']\n",
        ""
    );
    fs::write(folder.join("prometheus.yml"), config)?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let log = fs::File::create(folder.join("log"))?;
    let mut server = Command::new("prometheus");
    server.arg("--config.file").arg(folder.join("prometheus.yml"));
    server.arg("--storage.tsdb.path").arg(folder.join("data"));
    server.arg(format!("--web.listen-address={port}"));
    server.stdout(log.try_clone()?).stderr(log);
    Ok((ChildProcess(server.spawn().context("cannot start prometheus")?), port.to_string()))
}

/// Asks the server again and again until it has an answer that is not empty.
fn asked(address: &str, query: &str, otherwise: &str) -> anyhow::Result<Value> {
    let end = Instant::now() + LONGEST;
    loop {
        let answer = get(address, query);
        if let Ok(answer) = &answer {
            let result = &answer["data"]["result"];
            let has = match result.as_array() {
                Some(rows) => !rows.is_empty(),
                None => answer["data"].as_object().is_some_and(|all| !all.is_empty()),
            };
            if has {
                return Ok(answer.clone());
            }
        }
        if Instant::now() > end {
            bail!("{otherwise}: {query}: {answer:?}");
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn get(address: &str, query: &str) -> anyhow::Result<Value> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let query = query.replace(' ', "%20").replace('>', "%3E");
    let query = query.replace('[', "%5B").replace(']', "%5D");
    write!(stream, "GET /api/v1/{query} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (_, body) = text.split_once("\r\n\r\n").context("no answer")?;
    Ok(serde_json::from_str(body)?)
}
