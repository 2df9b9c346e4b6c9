use super::*;
use slat::PageSize;

fn state(policy: CachePolicy) -> CacheState {
    let config = Config::new(3, PageSize::SIZE_2M);
    CacheState::new(&Config { caches: policy, ..config }, false)
}

/// Begins and ends an event; returns the work that it needs.
fn step(state: &CacheState, id: u16, event: Event) -> Work {
    state.begin(id, event);
    let work = state.work(id, event);
    state.end(id, event, work);
    work
}

fn flushes(state: &CacheState, id: u16, event: Event) -> bool {
    matches!(step(state, id, event), Work::All { .. })
}

const EVENTS: [Event; 4] = [Event::On, Event::SetWay, Event::Off, Event::Reset];

#[test]
fn every_event_of_every_vcpu_flushes_under_every() {
    let state = state(CachePolicy::Every);
    for id in 0..3 {
        assert!(EVENTS.iter().all(|&event| flushes(&state, id, event)));
    }
}

#[test]
fn switches_of_vcpu_0_alone_flush_under_vcpu0() {
    let state = state(CachePolicy::Vcpu0);
    assert!(EVENTS.iter().all(|&event| flushes(&state, 0, event)));
    for (event, flushed) in EVENTS.into_iter().zip([false, true, false, true]) {
        assert_eq!(flushes(&state, 1, event), flushed, "{event:?}");
    }
}

#[test]
fn the_first_to_switch_on_flushes_under_first() {
    let state = state(CachePolicy::First);
    assert!(flushes(&state, 1, Event::On));
    assert!(!flushes(&state, 0, Event::On));
    assert!(!flushes(&state, 2, Event::On));
}

#[test]
fn an_event_that_re_arms_first_flushes_and_so_does_the_next_on() {
    for event in [Event::Off, Event::SetWay, Event::Reset] {
        let state = state(CachePolicy::First);
        assert!(flushes(&state, 1, Event::On));
        assert!(flushes(&state, 1, event), "{event:?}");
        assert!(flushes(&state, 0, Event::On), "{event:?}");
        assert!(!flushes(&state, 2, Event::On), "{event:?}");
    }
}

#[test]
fn a_flush_begun_before_first_is_re_armed_does_not_disarm_it() {
    let state = state(CachePolicy::First);
    let work = state.work(0, Event::On);
    state.begin(1, Event::Reset);
    state.end(0, Event::On, work);
    assert!(flushes(&state, 2, Event::On));
}

#[test]
fn a_vcpu_has_a_view_while_its_caches_are_off_under_exact() {
    let state = state(CachePolicy::Exact);
    assert_eq!(state.view(1), Some(1));
    assert_eq!(step(&state, 1, Event::On), Work::Leave);
    assert_eq!((state.view(1), state.view(0)), (None, Some(0)));
    assert_eq!(step(&state, 1, Event::SetWay), Work::Views);
    assert_eq!(step(&state, 1, Event::Off), Work::Nothing);
    assert_eq!(state.view(1), Some(1));
    assert_eq!(step(&state, 1, Event::Reset), Work::Leave);
    assert_eq!(state.view(1), Some(1));
}

#[test]
fn registers_are_trapped_with_caches_off_and_after_a_set_way() {
    for &policy in CachePolicy::ALL {
        let state = state(policy);
        assert!(state.traps(0));
        for (event, traps) in EVENTS.into_iter().zip([false, true, true, true]) {
            step(&state, 0, event);
            assert_eq!(state.traps(0), traps, "{event:?}");
        }
    }
}

#[test]
fn a_vcpu_counts_as_uncached_from_before_a_flush_until_after() {
    let state = state(CachePolicy::Every);
    for id in 0..3 {
        state.begin(id, Event::On);
        assert!(state.any_uncached());
        let work = state.work(id, Event::On);
        state.end(id, Event::On, work);
    }
    assert!(!state.any_uncached());
    state.begin(2, Event::Reset);
    assert!(state.any_uncached());
}

#[test]
fn where_the_guest_cannot_get_past_the_caches_nothing_is_done() {
    let config = Config::new(2, PageSize::SIZE_2M);
    for &policy in CachePolicy::ALL {
        let state = CacheState::new(&Config { caches: policy, ..config }, true);
        assert!(EVENTS.iter().all(|&event| step(&state, 0, event) == Work::Nothing));
        assert!(!state.traps(0) && !state.any_uncached() && state.view(1).is_none());
    }
}
