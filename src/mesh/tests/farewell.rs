//! Ranks that come to an end while others read what they have sent.

use super::*;
use crate::mesh::protocol::Tag;

const LEN: usize = 100_000;
/// How long the other rank takes to look, at most.
const SLOW: Duration = Duration::from_millis(20);

/// What the second of three ranks does, whose buffers are of a message to the first, and of one from the third, which is lost if `loses`.
fn ends(wire: SoftWire, loses: bool, how: impl FnOnce(&Mesh, UnboundBuffer, UnboundBuffer) + Send) {
    let [first, second, _third] = three_in_a_row(wire);
    let pages = memory(&[0; LEN]);
    let mine = first.device.register(given(&pages, LEN)).unwrap();
    let receive = first.with(|core| core.recv(&[1], Tag::User(5), mine.place(0, LEN).unwrap().place)).unwrap();
    let end = Instant::now() + TIMEOUT;
    until_receive_is_known(&second, &first);
    let (from, to) = (memory(&[9; LEN]), memory(&[0; LEN]));
    let out = UnboundBuffer::new(&second, given(&from, LEN)).unwrap();
    let into = UnboundBuffer::new(&second, given(&to, LEN)).unwrap();
    out.send(0, 5, 0, None).unwrap();
    into.recv(&[2], 6, 0, None).unwrap();
    if loses {
        second.with(|core| core.pair(2).unwrap().fail(&Error::remote("it has ended")));
    }
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| how(&second, out, into));
        until_failed(&second);
        let failed = Instant::now();
        while !ends.is_finished() && failed.elapsed() < SLOW {
            std::thread::yield_now();
        }
        while first.with(|core| core.ops.take(receive).is_none()) {
            assert!(Instant::now() < end, "nothing comes");
            first.check().unwrap();
            first.with(Driven::poll);
        }
        assert!(contents(&pages, LEN) == [9; LEN], "{wire:?}");
    });
}

/// However the error is found: by a wait, by a test, by another thread's wait, or because the time is over.
#[test]
fn a_buffer_is_read_until_the_others_know_of_its_rank_s_end() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ends(wire, true, |_, out, into| {
            into.wait_recv(TIMEOUT).unwrap_err();
            drop(out);
        });
        ends(wire, true, |mesh, out, into| {
            until_failed(mesh);
            into.test_recv().unwrap_err();
            drop(out);
        });
        ends(wire, true, |mesh, out, into| {
            std::thread::scope(|scope| {
                scope.spawn(|| into.wait_recv(TIMEOUT).unwrap_err());
                until_failed(mesh);
                drop(out);
            });
        });
        ends(wire, false, |_, out, into| {
            into.wait_recv(Duration::from_millis(1)).unwrap_err();
            drop(out);
        });
    }
}
