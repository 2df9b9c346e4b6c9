//! Every pair of services, on one guest at the same time.

use crate::fixture::*;
use crate::histories::{History, count, run};
use slat::PageSize;
use slat_guest::*;
use slat_sim::{Barrier, Tlbi};

macro_rules! services {
    ($($name:ident)*) => {
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        enum Service {
            $($name,)*
        }

        use Service::*;

        const ALL: [Service; 16] = [$($name),*];
    };
}

services! {
    ManualLog LegacyLog HardwareLog InitiallySet Ring EagerSplit NoExecuteHuge Ageing Invalidation
    LogOnAndOff Vmids Conversion Late Devices Buffers View
}

/// Adds the part of a service that is decided when the guest is made.
fn configured(mut config: Config, service: Service) -> Config {
    match service {
        HardwareLog => config.logging = Logging::Hardware,
        InitiallySet => config.initially_set = true,
        Ring => config.ring = Some(128),
        EagerSplit => config.eager_split = Some(PageSize::SIZE_4K),
        NoExecuteHuge => config.execute_huge = ExecuteHuge::Split,
        View => config.caches = CachePolicy::Exact,
        Devices => config.devices = true,
        Buffers => (config.logging, config.log_buffers) = (Logging::Hardware, true),
        _ => {}
    }
    config
}

/// Does one step of a service.
fn happens<C: Case>(history: &mut History<'_, '_, C>, service: Service) {
    match service {
        LegacyLog if history.logs => history.take(),
        ManualLog | HardwareLog | InitiallySet | Buffers if history.logs => history.clear(),
        Ring => history.reset(),
        EagerSplit => history.split(),
        NoExecuteHuge => _ = history.vcpus[0].worker().recover_huge_pages(),
        Ageing => history.age(),
        Invalidation => history.invalidate(),
        LogOnAndOff => history.toggle(),
        Vmids => history.change_vmid(),
        Conversion => history.convert(),
        Late => history.late(),
        Devices => history.device(),
        _ => {}
    }
}

/// vCPU 1 switches its caches; its CPU changes roots.
fn switch(history: &mut History<'_, '_, ArmUncached>) {
    let vcpu = &mut history.vcpus[1];
    let on = !vcpu.is_cached();
    if vcpu.set_caches(on).root_changed {
        let (machine, vmid) = (history.machine, history.guest.tables().vmid());
        machine.here(1);
        machine.cpu(1).load(vmid, vcpu.root());
        machine.vttbr(vmid);
        machine.tlbi(Tlbi::Vmalls12e1, 0);
        machine.dsb(Barrier::Nsh);
        machine.isb();
        machine.here(0);
    }
}

fn pair<C: Case>(one: Service, two: Service, seed: u64) {
    let config = configured(configured(config(), one), two);
    let rng = fastrand::Rng::with_seed(seed);
    if ![one, two].contains(&View) {
        let machine = C::machine(2).random(seed);
        return run::<C>(&machine, config, rng, |history| {
            (0..50).for_each(|_| step(history, one, two));
        });
    }
    let machine = ArmUncached::machine(2).random(seed);
    run::<ArmUncached>(&machine, config, rng, |history| {
        for _ in 0..50 {
            match history.rng.u8(..6) {
                0 => switch(history),
                _ => step(history, one, two),
            }
        }
    });
}

fn step<C: Case>(history: &mut History<'_, '_, C>, one: Service, two: Service) {
    match history.rng.u8(..6) {
        0 | 1 => happens(history, one),
        2 => happens(history, two),
        _ => history.use_page(),
    }
}

/// Runs all pairs of `services`; returns their number. Pairs with [`View`] need Arm without
/// FEAT_S2FWB.
fn every_two<C: Case>(services: &[Service]) -> usize {
    let mut tested = 0;
    let seeds = crate::seed::seeds(count().div_ceil(20));
    for (at, &one) in services.iter().enumerate() {
        for &two in &services[at..] {
            // Faults fill rings, so rings need write protection.
            if [one, two] == [HardwareLog, Ring] || [one, two] == [Ring, Buffers] {
                continue;
            }
            // Not all hardware writes the addresses of pages that it marks.
            if [one, two].contains(&Buffers) && C::BUFFER.is_none() {
                continue;
            }
            // Private memory needs vCPUs that cannot bypass their caches.
            if [one, two] == [Conversion, View] {
                continue;
            }
            for seed in seeds.clone() {
                let done = std::panic::catch_unwind(|| pair::<C>(one, two, seed));
                assert!(
                    done.is_ok(),
                    "{one:?} with {two:?}: run it again with SLAT_SEED={seed} HISTORIES=1"
                );
            }
            tested += 1;
        }
    }
    tested
}

#[test]
fn every_two_services_work_together() {
    let tested = every_two::<ArmDirty>(&ALL);
    assert_eq!(tested, 133, "of sixteen services all pairs but three, and each alone");
}

#[cfg(feature = "every-format")]
mod every_two_services_work_together {
    use super::*;

    fn run<C: Case>() {
        let (View, others) = ALL.split_last().expect("sixteen") else { panic!("the last") };
        let buffers = if C::BUFFER.is_some() { 14 } else { 0 };
        assert_eq!(every_two::<C>(others), 104 + buffers);
    }

    crate::on_cases!(run: on_intel Intel);
    crate::on_others!(run);
}
