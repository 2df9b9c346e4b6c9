//! Reports and hosts for tests, with all kinds of rows and fixed figures.

use crate::host::{Cpu, Host, HugePool, Kernel, Kvm, Maybe, Memory, Thp, Virtualisation};
use crate::record::{Kind, Measurement, Omission, Report, SCHEMA};
use crate::trust::Trust;
use crate::unit::Unit;
use crate::verdict::Verdict;
use serde_json::{Value, json};

/// Returns a report with all kinds of results.
pub fn report() -> Report {
    let mut results = dirty_log();
    results.extend(limits());
    results.extend(splits());
    Report {
        schema: SCHEMA,
        partial: false,
        tool: "0.1.0".into(),
        trust: trust(),
        verdict: Verdict::default(),
        host: host(),
        command: ["slat", "--output", "a b"].map(str::to_owned).to_vec(),
        results,
        skipped: vec![Omission {
            what: "dirty-log on hugetlb-2m".to_owned(),
            reason: "the pool of 2m pages is empty; `sysctl vm.nr_hugepages=128` fills it"
                .to_owned(),
            failed: false,
        }],
        repeated: Vec::new(),
    }
}

/// Returns the trust of a run without disturbances.
pub fn trust() -> Trust {
    Trust {
        trusted: true,
        reasons: Vec::new(),
        began: 1_700_000_000,
        seconds: 12.5,
        load_begin: Maybe(Some(0.25)),
        others: Maybe(Some(2.0)),
        load_end: Maybe(Some(1.5)),
        steal: Maybe(Some(0.125)),
        waited: Maybe(Some(3.0)),
    }
}

/// Returns the same report with a single result, which is easier to read.
pub fn short_report() -> Report {
    let report = report();
    let bounded = |m: &Measurement| m.variant == "bounded";
    let results = report.results.iter().filter(|m| bounded(m)).take(1).cloned().collect();
    Report { results, ..report }
}

/// Returns results of the engine's guests.
pub fn guests() -> Vec<Measurement> {
    let mut results = Vec::new();
    let params = |figure: &str| {
        json!({
            "memory": 2u64 << 30, "vcpus": 2, "backing": "1g", "format": "ept", "figure": figure,
        })
    };
    let mut add =
        |scenario, variant, figure, unit: &str, samples: &[f64], counts: &[(&str, u64)]| {
            let mut one = measurement(scenario, "engine", variant, params(figure), samples);
            one.unit = unit.into();
            one.counts = counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
            results.push(one);
        };
    for (way, scale, faults) in [("zap", 1.0, 524_288), ("split", 0.1, 1024)] {
        let faults = [("faults", faults)];
        add("execute", way, "populate", "s", &[0.003, 0.0031, 0.0029], &[("faults", 2)]);
        add("execute", way, "execute", "s", &[0.3 * scale, 0.31 * scale, 0.29 * scale], &faults);
    }
    add(
        "guest-log",
        "manual",
        "stall",
        "ms/s",
        &[3.5, 3.6],
        &[("faults_max", 77), ("faults_min", 7)],
    );
    add("guest-log", "manual", "longest", "s", &[1e-5, 3e-4], &[]);
    add("guest-log", "ring", "stall", "ms/s", &[9.5, 9.6], &[("waits_for_ring", 5)]);
    let asked = json!({ "variants": "split", "against": "zap", "asked": 0.002 });
    results.push(Measurement {
        unit: Unit::RATIO,
        kind: Kind::Ratio,
        ..measurement("guest-asked", "engine", "faults", asked, &[0.001953125; 3])
    });
    results
}

/// Returns results of guests under KVM: a migration that did not converge and one that did,
/// execution, and logging.
pub fn kvm() -> Vec<Measurement> {
    let mut results = Vec::new();
    let mut add = |scenario, params: &Value, figures: &[(&str, &str, f64)]| {
        for (variant, unit, median) in figures {
            let samples = [median * 0.99, *median, median * 1.02];
            let mut one = measurement(scenario, "kvm", variant, params.clone(), &samples);
            one.unit = (*unit).into();
            results.push(one);
        }
    };
    let mut courses = Vec::new();
    let stall = |phase: &str, scale: f64| {
        let figures = [
            ("stall-page", "s", 9e-6 * scale),
            ("stall", "ms/s", 40.0 * scale),
            ("stall-p50", "s", 9e-6),
            ("stall-p95", "s", 12e-6),
            ("stall-p99", "s", 21e-6 * scale),
            ("stall-max", "s", 4e-3),
            ("waited", "ms/s", 3.0),
            ("stolen", "ms/s", 0.0),
        ];
        figures.map(|(name, unit, median)| (format!("{phase}-{name}"), unit, median))
    };
    for (way, scale, clear) in [("legacy", 1.0, 0.0), ("manual", 0.9, 4e-4)] {
        let params = json!({
            "memory": 256u64 << 20, "vcpus": 2, "backing": "4k", "way": way,
            "dirty_rate": 524_288_000, "link": 1_250_000_000u64, "max_downtime_ms": 300,
            "max_rounds": 30,
        });
        let mut figures = vec![
            ("run", "s", 0.4 * scale),
            ("total", "s", 0.5 * scale),
            ("rounds", "rounds", 3.0),
            ("copied", "MiB", 372.0 * scale),
            ("downtime", "s", 0.1 * scale),
            ("write-rate", "MiB/s", 310.0 * scale),
            ("copy-rate", "MiB/s", 1010.0),
            ("loss", "%", 35.0 * scale),
            ("loss-worst", "%", 60.0 * scale),
            ("get-longest-call", "s", 6e-4),
        ];
        if clear > 0.0 {
            figures.push(("clear-longest-call", "s", clear));
        }
        add("migrate", &params, &figures);
        for (variant, unit, course) in [
            ("pace", "%", &[95.0, 60.0, 30.0][..]),
            ("pace-at", "s", &[0.1, 0.2, 0.3]),
            ("pass-left", "pages", &[9000.0, 4000.0]),
            ("pass-at", "s", &[0.25, 0.35]),
            ("pass-stop", "s", &[0.4, 0.5]),
        ] {
            let mut one = measurement("migrate", "kvm", variant, params.clone(), course);
            one.unit = unit.into();
            courses.push(one.of_kind(Kind::Course));
        }
        let stalls = stall("run", scale);
        let stalls: Vec<_> = stalls.iter().map(|(name, unit, it)| (&**name, *unit, *it)).collect();
        add("migrate", &params, &stalls);
    }
    let params = json!({ "memory": 256u64 << 20, "vcpus": 2, "backing": "2m" });
    add(
        "execute",
        &params,
        &[("populate", "s", 0.01), ("execute", "s", 0.002), ("read", "s", 6e-4)],
    );
    let stalls = stall("execute", 0.5);
    let stalls: Vec<_> = stalls.iter().map(|(name, unit, it)| (&**name, *unit, *it)).collect();
    add("execute", &params, &stalls);
    let params = json!({ "memory": 256u64 << 20, "vcpus": 2, "slot_size": 64u64 << 20 });
    add(
        "memslot",
        &params,
        &[
            ("loss", "%", 60.0),
            ("loss-worst", "%", 62.0),
            ("faults", "faults", 65_536.0),
            ("add", "s", 9e-6),
            ("add-longest-call", "s", 5e-5),
            ("move", "s", 3e-5),
            ("move-longest-call", "s", 4e-3),
            ("delete", "s", 3e-5),
            ("delete-longest-call", "s", 5e-3),
        ],
    );
    let stalls = stall("run", 2.0);
    let stalls: Vec<_> = stalls.iter().map(|(name, unit, it)| (&**name, *unit, *it)).collect();
    add("memslot", &params, &stalls);
    results.extend(courses);
    for m in results.iter_mut().filter(|m| m.variant == "run" || m.variant == "execute") {
        let converged = u64::from(m.params.get("way").is_none_or(|way| way == "manual"));
        let counts = [
            ("converged", converged),
            ("vcpu_ns", 800_000_000),
            ("usual_ns", 30_000_000),
            ("stall_p50_ns", 9_000),
            ("waited_ns", 5_000_000),
            ("pf_taken_typical", 80_000),
            ("pf_fixed_typical", 79_000),
            ("pf_fast_typical", 1_000),
        ];
        m.counts = counts.map(|(name, count)| (name.to_owned(), count)).into();
    }
    results
}

fn host() -> Host {
    let known = |text: &str| Maybe(Some(text.to_owned()));
    let parameters = [("nx_huge_pages".to_owned(), known("N"))].into();
    Host {
        name: known("example"),
        cpu: Cpu {
            model: known("Example CPU <5>"),
            architecture: "x86_64".into(),
            usable: 2,
            microcode: known("0x1"),
            governor: Maybe(None),
            smt: known("on"),
            mhz: Maybe(Some(2100.0)),
            turbo: Maybe(None),
            mitigations: [("mds".to_owned(), known("Not affected"))].into(),
        },
        kernel: Kernel {
            release: known("6.18.0"),
            version: known("#1 SMP"),
            command_line: known("ro quiet"),
        },
        virtualisation: Virtualisation { hypervisor: Maybe(Some(true)), product: Maybe(None) },
        memory: Memory { total: Maybe(Some(24 << 30)), available: Maybe(Some(23 << 30)) },
        kvm: Kvm {
            device: "usable".to_owned(),
            parameters: [("kvm".to_owned(), parameters)].into(),
        },
        thp: Thp { enabled: known("madvise"), defrag: known("madvise") },
        hugetlb: vec![HugePool { page_size: 2 << 20, total: Maybe(Some(0)), free: Maybe(Some(0)) }],
        numa_nodes: Maybe(Some(1)),
        aslr: known("2"),
    }
}

fn measurement(
    scenario: &str,
    target: &str,
    variant: &str,
    params: Value,
    samples: &[f64],
) -> Measurement {
    let Value::Object(params) = params else { panic!("parameters are an object") };
    Measurement::new(scenario, target, variant, params, Unit::SECONDS, samples.to_vec())
}

fn dirty_log() -> Vec<Measurement> {
    let mut results = Vec::new();
    for (backing, manual, scale) in [("4k", false, 1.0), ("4k", true, 0.9), ("2m", true, 0.4)] {
        let params = json!({
            "memory": 256u64 << 20, "vcpus": 2, "backing": backing,
            "manual_protect": manual, "initially_set": false, "clear_chunk": null,
        });
        let mut add = |variant: &str, samples: &[f64]| {
            let samples: Vec<_> = samples.iter().map(|time| time * scale).collect();
            results.push(measurement("dirty-log", "kvm", variant, params.clone(), &samples));
        };
        add("populate", &[0.81]);
        add("enable", &[0.00123]);
        add("dirty", &[0.762, 0.751, 0.749]);
        add("get", &[0.00041, 0.00042, 0.00039]);
        if manual {
            add("clear", &[0.0021, 0.0022, 0.0020]);
        }
        add("disable", &[0.0005]);
        for vcpu in 0..2 {
            let mut params = params.clone();
            params["vcpu"] = vcpu.into();
            let samples = [0.76, 0.75, 0.74].map(|time| time * scale + f64::from(vcpu) / 1e3);
            let mut dirty = measurement("dirty-log", "kvm", "dirty", params, &samples);
            dirty.counts.insert("pages".to_owned(), 32768);
            dirty.counts.insert("pf_taken".to_owned(), 32770);
            results.push(dirty);
        }
    }
    results
}

fn splits() -> Vec<Measurement> {
    let mut results = Vec::new();
    for (backing, when, what, base) in [
        ("4k", "enable", "split", 0.0567),
        ("4k", "clear", "split", 0.0571),
        ("4k", "clear", "call", 0.1316),
        ("2m", "enable", "split", 0.2764),
        ("1g", "enable", "split", 0.2859),
    ] {
        for (walk, factor, entries) in
            [("every-entry", 1.0, 33_587_200), ("bounded", 0.021, 65_600), ("batched", 0.004, 64)]
        {
            let params = json!({
                "memory": 64u64 << 30, "backing": backing, "target_size": "4k", "when": when,
                "what": what, "granule": 4096, "bbm": 0,
            });
            let samples: Vec<_> =
                (0..11).map(|n| base * factor * (1.0 + f64::from(n) / 100.0)).collect();
            let mut split = measurement("split", "engine", walk, params, &samples);
            split.counts = [
                ("entries_read", entries),
                ("entries_written", 0),
                ("tables_built", 0),
                ("invalidations", 1),
            ]
            .map(|(name, count)| (name.to_owned(), count))
            .into();
            results.push(split);
        }
    }
    results
}

fn limits() -> Vec<Measurement> {
    let limit = |variant: &str, bytes: u64, seconds: f64| {
        let params = json!({ "memory": 64u64 << 30, "bytes": bytes, "entries": bytes / 8 });
        measurement("limit", "machine", variant, params, &[seconds, seconds * 1.01, seconds * 0.99])
    };
    vec![
        limit("fill-plain", 128 << 20, 0.0131),
        limit("fill-best", 128 << 20, 0.0092),
        limit("read", 128 << 20, 0.0081),
        limit("read-upper", 256 << 10, 0.000_02),
        limit("cas", 128 << 20, 0.0901),
    ]
}

/// Creates the files of a host, by their paths below its root.
///
/// # Panics
/// If the files cannot be written.
pub fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a folder for files");
    for (path, text) in files {
        let path = root.path().join(path);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).expect("a folder below it");
        }
        std::fs::write(path, text).expect("a file in it");
    }
    root
}

/// Returns whether a value fits a schema, by the words that schemas of types have.
pub fn fits(schema: &Value, value: &Value) -> bool {
    fits_part(schema, schema, value)
}

/// Returns whether a value fits a part of a schema, by the words that schemas of types have.
fn fits_part(all: &Value, part: &Value, value: &Value) -> bool {
    if let Some(path) = part["$ref"].as_str() {
        return fits_part(all, all.pointer(&path[1..]).unwrap(), value);
    }
    let of_type = |name: &Value| match name.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{other}"),
    };
    let types = match &part["type"] {
        Value::Array(types) => types.iter().any(of_type),
        Value::Null => true,
        name => of_type(name),
    };
    let inner = |inner: &Value, of: &Value| of.is_boolean() || fits_part(all, of, inner);
    let known = |(name, of): (&String, &Value)| match part["properties"].get(name) {
        Some(known) => inner(of, known),
        None => part.get("additionalProperties").is_some_and(|others| inner(of, others)),
    };
    let mut items = value.as_array().into_iter().flatten();
    let mut required = part["required"].as_array().into_iter().flatten();
    let tuple = part["prefixItems"].as_array().into_iter().flatten();
    types
        && (!value.is_array()
            || tuple.enumerate().all(|(place, of)| fits_part(all, of, &value[place])))
        && part.get("const").is_none_or(|constant| constant == value)
        && part["enum"].as_array().is_none_or(|any| any.contains(value))
        && part["oneOf"].as_array().is_none_or(|any| any.iter().any(|of| fits_part(all, of, value)))
        && part["anyOf"].as_array().is_none_or(|any| any.iter().any(|of| fits_part(all, of, value)))
        && part.get("items").is_none_or(|of| items.all(|item| inner(item, of)))
        && required.all(|name| value.get(name.as_str().unwrap()).is_some())
        && value.as_object().is_none_or(|object| {
            (part["properties"].is_null() && part.get("additionalProperties").is_none())
                || object.iter().all(known)
        })
}
