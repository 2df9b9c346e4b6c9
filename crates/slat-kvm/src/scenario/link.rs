//! The link to the host that a guest left, and the two ends of it: pages come in order, after a
//! delay, no faster than the link. They and the requests for them cross sockets; each frame carries
//! the time at which a link of that delay and rate would have delivered it.

use crate::memory::HostMemory;
use crate::{Backing, Error};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A link, as the pages of a guest see it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes per second.
    pub rate: f64,
    /// The time from one end to the other.
    pub delay: Duration,
    /// Bytes that the source has queued before a page that is asked for.
    pub queue: u64,
}

/// Most pages of a frame that nobody asked for.
const MOST: u64 = 16;
/// Longest wait for the other end before a thread looks whether it is to end.
const PATIENCE: Duration = Duration::from_millis(50);

impl Link {
    /// Checks the values.
    pub(super) fn check(&self) -> Result<(), Error> {
        if !(self.rate.is_finite() && self.rate >= 1.0) {
            let rule = "must be at least 1";
            return Err(Error::invalid("bytes a second of the link", self.rate, rule));
        }
        if self.delay > Duration::from_secs(10) {
            return Err(Error::invalid(
                "seconds of delay",
                self.delay.as_secs(),
                "must be below 10",
            ));
        }
        Ok(())
    }

    /// Returns how long the link takes to carry so many bytes, without its delay.
    fn time(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64((bytes as f64 / self.rate).min(1e9))
    }
}

/// A frame, or a request without pages. The words cross the socket as they are.
#[derive(Clone, Copy)]
struct Head {
    first: u64,
    pages: u64,
    /// When it arrives, in nanoseconds since the link began.
    arrives: u64,
}

const HEAD: usize = 24;

impl Head {
    fn bytes(self) -> [u8; HEAD] {
        let words = [self.first, self.pages, self.arrives].map(u64::to_ne_bytes);
        std::array::from_fn(|at| words[at / 8][at % 8])
    }

    fn of(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        Some(Self { first: word(0)?, pages: word(8)?, arrives: word(16)? })
    }
}

/// The sockets of a link between two ends.
pub(super) struct Wire {
    link: Link,
    begin: Instant,
    /// Requests: the asking end, and the answering one.
    requests: [UnixStream; 2],
    pages: [UnixStream; 2],
    over: AtomicBool,
}

impl Wire {
    pub fn new(link: Link) -> Result<Self, Error> {
        let pair = || UnixStream::pair().map_err(Error::os("socketpair"));
        let wire = Self {
            link,
            begin: Instant::now(),
            requests: pair()?.into(),
            pages: pair()?.into(),
            over: AtomicBool::new(false),
        };
        for end in [&wire.requests[1], &wire.pages[1]] {
            end.set_nonblocking(true).map_err(Error::os("fcntl of a socket"))?;
        }
        Ok(wire)
    }

    /// Ends both ends at once.
    pub fn cut(&self) {
        self.over.store(true, Ordering::Release);
        for end in self.requests.iter().chain(&self.pages) {
            // It fails only if the other end is gone, which is what was asked for.
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn since_begin(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.begin).as_nanos() as u64
    }

    /// Asks for a page.
    pub fn ask(&self, page: u64) -> Result<(), Error> {
        let arrives = self.since_begin(Instant::now() + self.link.delay);
        match (&self.requests[0]).write_all(&Head { first: page, pages: 0, arrives }.bytes()) {
            Err(_) if self.is_over() => Ok(()),
            sent => sent.map_err(Error::os("write of a request")),
        }
    }

    /// Sends all pages of a memory: those that are asked for first, the others in order.
    pub fn send(&self, memory: &HostMemory) -> Result<(), Error> {
        exact_sleeps();
        let pages = memory.len() / Backing::Small.page_size();
        let mut sent = vec![false; pages as usize];
        let (mut left, mut cursor) = (pages, 0u64);
        let mut inbox = Inbox::default();
        let mut asked: VecDeque<(Instant, u64)> = VecDeque::new();
        // When the link has carried all that was sent.
        let mut free = Instant::now();
        while left > 0 && !self.is_over() {
            while let Some((head, _)) = inbox.next(&self.requests[1])? {
                asked.push_back((self.begin + Duration::from_nanos(head.arrives), head.first));
            }
            let now = Instant::now();
            let wanted = take_due(&mut asked, now).map(|(_, page)| page);
            let ahead = self.link.time(self.link.queue);
            let range = match wanted {
                Some(page) if sent.get(page as usize) == Some(&false) => page..page + 1,
                Some(_) => continue,
                None if free.saturating_duration_since(now) <= ahead => {
                    let mut unsent = (cursor..pages).skip_while(|&page| sent[page as usize]);
                    let first = unsent.next().unwrap_or(pages);
                    let most = (self.link.queue / Backing::Small.page_size()).clamp(1, MOST);
                    let run = (first..pages.min(first + most))
                        .take_while(|&page| !sent[page as usize])
                        .count() as u64;
                    cursor = first + run;
                    first..cursor
                }
                None => {
                    let next =
                        asked.front().map_or(free - ahead, |(due, _)| (free - ahead).min(*due));
                    self.wait(&self.requests[1], next)?;
                    continue;
                }
            };
            left -= range.end - range.start;
            sent[range.start as usize..range.end as usize].fill(true);
            free = free.max(now)
                + self.link.time(Backing::Small.page_size() * (range.end - range.start));
            let arrives = self.since_begin(free + self.link.delay);
            let head = Head { first: range.start, pages: range.end - range.start, arrives };
            match self.write(head, memory) {
                Err(_) if self.is_over() => return Ok(()),
                sent => sent.map_err(Error::os("write of a page"))?,
            }
        }
        Ok(())
    }

    fn write(&self, head: Head, memory: &HostMemory) -> std::io::Result<()> {
        let size = Backing::Small.page_size();
        let mut frame = Vec::with_capacity(HEAD + (head.pages * size) as usize);
        frame.extend(head.bytes());
        let words = memory.words(head.first * size, head.pages * size);
        for word in words.ok_or(std::io::ErrorKind::InvalidInput)? {
            frame.extend(word.load(Ordering::Relaxed).to_ne_bytes());
        }
        (&self.pages[0]).write_all(&frame)
    }

    /// Calls `place` with each frame's first page and contents, when it arrives, until all of
    /// `pages` pages have come.
    pub fn receive(
        &self,
        mut pages: u64,
        mut place: impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        exact_sleeps();
        let mut inbox = Inbox::default();
        let mut waiting: VecDeque<(Instant, (u64, Vec<u8>))> = VecDeque::new();
        while pages > 0 && !self.is_over() {
            while let Some((head, contents)) = inbox.next(&self.pages[1])? {
                let due = self.begin + Duration::from_nanos(head.arrives);
                waiting.push_back((due, (head.first, contents)));
            }
            match take_due(&mut waiting, Instant::now()) {
                Some((_, (first, contents))) => {
                    pages =
                        pages.saturating_sub(contents.len() as u64 / Backing::Small.page_size());
                    place(first, &contents)?;
                }
                None => {
                    let next = waiting.front().map(|(due, ..)| *due);
                    self.wait(&self.pages[1], next.unwrap_or_else(|| Instant::now() + PATIENCE))?;
                }
            }
        }
        Ok(())
    }

    /// Waits until a socket has something, or until `until`.
    fn wait(&self, socket: &UnixStream, until: Instant) -> Result<(), Error> {
        let left = until.saturating_duration_since(Instant::now()).min(PATIENCE);
        let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&time)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(answer) => Err(Error::os("poll of a socket")(answer)),
        }
    }
}

/// What came by a socket and is not a whole frame yet.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    /// Where the first frame that was not taken begins.
    at: usize,
}

impl Inbox {
    /// Returns the next frame, or `None` if none is whole yet.
    fn next(&mut self, mut socket: &UnixStream) -> Result<Option<(Head, Vec<u8>)>, Error> {
        loop {
            let rest = &self.bytes[self.at..];
            if let Some(head) = Head::of(rest) {
                let end = HEAD + (head.pages * Backing::Small.page_size()) as usize;
                if let Some(frame) = rest.get(HEAD..end) {
                    let frame = frame.to_vec();
                    self.at += end;
                    return Ok(Some((head, frame)));
                }
            }
            self.bytes.drain(..self.at);
            self.at = 0;
            let mut more = [0; 64 << 10];
            match socket.read(&mut more) {
                Ok(0) => return Ok(None),
                Ok(count) => self.bytes.extend_from_slice(&more[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::os("read of a socket")(error)),
            }
        }
    }
}

/// Takes the first of a queue if it is due.
fn take_due<T>(queue: &mut VecDeque<(Instant, T)>, now: Instant) -> Option<(Instant, T)> {
    queue.front().is_some_and(|(due, _)| *due <= now).then(|| queue.pop_front()).flatten()
}

/// Lets the thread's sleeps end when they are due, not up to 50 µs later, which is the usual slack.
pub(super) fn exact_sleeps() {
    // SAFETY: the call takes one number, and changes nothing but the thread's timers. If it fails,
    // pages come later, as on a slower link.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_crosses_the_link_once_and_requested_ones_first() {
        let memory = HostMemory::new(4 << 20, Backing::Small).unwrap();
        (0..1024).for_each(|page| memory.write(page * 4096 + 8, page + 1).unwrap());
        let delay = Duration::from_millis(1);
        let wire = Wire::new(Link { rate: 20e6, delay, queue: 64 << 10 }).unwrap();
        wire.ask(1000).unwrap();
        let mut order = Vec::new();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let source = scope.spawn(|| wire.send(&memory));
            wire.receive(1024, |first, contents| {
                for (page, bytes) in (first..).zip(contents.chunks(4096)) {
                    assert_eq!(bytes[8..16], (page + 1).to_ne_bytes());
                    order.push(page);
                }
                Ok(())
            })
            .unwrap();
            source.join().unwrap().unwrap();
        });
        // 4 MiB at 20 MB a second.
        assert!(begin.elapsed() >= Duration::from_millis(200));
        let place = order.iter().position(|&page| page == 1000).unwrap();
        assert!(place < 500, "{place}");
        order.sort_unstable();
        assert_eq!(order, (0..1024).collect::<Vec<_>>());
    }

    #[test]
    fn a_link_that_is_cut_ends_both_ends() {
        let memory = HostMemory::new(1 << 20, Backing::Small).unwrap();
        let wire = Wire::new(Link { rate: 1.0, delay: Duration::ZERO, queue: 0 }).unwrap();
        std::thread::scope(|scope| {
            let source = scope.spawn(|| wire.send(&memory));
            let receiver = scope.spawn(|| wire.receive(256, |_, _| Ok(())));
            wire.cut();
            assert!(source.join().unwrap().is_ok() && receiver.join().unwrap().is_ok());
        });
    }
}
