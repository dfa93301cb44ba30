//! Tests of a ring in each kind of memory, with both sides running, and with invalid counters and sizes.

use std::os::fd::AsRawFd;
use std::thread;

use super::*;
use crate::base::fd::OwnedFd;

const LIMITS: [u64; 4] = [0, 5, u32::MAX as u64 - 5, u64::MAX - 5];

fn geometry() -> Geometry {
    Geometry::new([1024, 1024, 8192]).unwrap()
}

fn pattern(step: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (step.wrapping_mul(31) ^ i.wrapping_mul(7)) as u8).collect()
}

/// Streams through the ring from one thread to another; sizes 0 to the slice's.
fn stream(ring: &Arc<Ring>, steps: u64, slice: u64) {
    let capacity = ring.geometry().step_bytes(Protocol::Simple) * slice as usize;
    let len = |n: u64| (n as usize * 37) % (capacity + 1);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut producer = Producer::new(ring.clone());
            producer.start(slice).unwrap();
            for n in 0..steps {
                while !producer.has_room(slice).unwrap() {
                    thread::yield_now();
                }
                // SAFETY: has_room granted the slots.
                unsafe { ring.copy_in(Protocol::Simple, producer.step(), &pattern(n, len(n))) }.unwrap();
                producer.post(slice, len(n));
            }
        });
        let mut consumer = Consumer::new(ring.clone());
        consumer.start(slice).unwrap();
        for n in 0..steps {
            let bytes = loop {
                match consumer.filled(slice, capacity).unwrap() {
                    Some(bytes) => break bytes,
                    None => thread::yield_now(),
                }
            };
            let mut got = vec![0; bytes];
            // SAFETY: filled reported the slots.
            unsafe { ring.copy_out(Protocol::Simple, consumer.step(), &mut got) }.unwrap();
            assert_eq!(got, pattern(n, len(n)), "{n}");
            consumer.release(slice);
        }
    });
}

#[test]
fn streams_in_every_kind_of_memory_and_over_the_wrap_of_the_counters() {
    for start in LIMITS {
        for slice in [1, 2, 4, 8] {
            stream(&Arc::new(Ring::private(geometry(), start).unwrap()), 100, slice);
        }
        stream(&Arc::new(Ring::memfd(geometry(), start).unwrap()), 100, 1);
        stream(&Arc::new(Ring::named(geometry(), start).unwrap()), 100, 2);
        let (control, data) = (Pages::new(512).unwrap(), Pages::new(10240).unwrap());
        control.write(0, &[0xa5; 512]);
        // SAFETY: both mappings outlive the ring and nobody else uses them.
        let ring = unsafe { Ring::over(control.ptr(0, 512), data.ptr(0, 10240), geometry(), Memory::Host, start) }.unwrap();
        stream(&Arc::new(ring), 100, 4);
    }
}

#[test]
fn a_shared_ring_describes_itself_to_a_process_that_maps_it() {
    let ring = Ring::memfd(geometry(), 7).unwrap();
    let bytes = ring.mapped_bytes().unwrap();
    let copy = OwnedFd::new(ring.fd().unwrap().try_clone_to_owned().unwrap());
    let mapped = Shm::attach(copy, bytes).unwrap();
    assert_eq!(mapped.load_u64(0, Relaxed), layout::MAGIC);
    assert_eq!((mapped.load_u32(8, Relaxed), mapped.load_u32(12, Relaxed)), (1, 8));
    assert_eq!((mapped.load_u64(16, Relaxed), mapped.load_u64(24, Relaxed)), (4096, 10240));
    let areas: Vec<u64> = (32..80).step_by(8).map(|at| mapped.load_u64(at, Relaxed)).collect();
    assert_eq!(areas, [0, 128, 1024, 128, 2048, 1024]);
    assert_eq!((mapped.load_u64(128, Relaxed), mapped.load_u64(256, Relaxed)), (7, 7));
    assert!((384..448).step_by(8).all(|at| mapped.load_u64(at, Relaxed) == u64::MAX));
    // A store through one mapping is seen through the other.
    ring.words().set_tail(99);
    assert_eq!(mapped.load_u64(256, Relaxed), 99);

    let named = Ring::named(geometry(), 0).unwrap();
    let path = named.path().unwrap();
    assert!(path.exists() && named.fd().unwrap().as_raw_fd() >= 0);
    drop(named);
    assert!(!path.exists());
    let private = Ring::private(geometry(), 0).unwrap();
    assert!(private.fd().is_none() && private.path().is_none() && private.mapped_bytes() == Some(16384));
}

#[test]
fn a_full_ring_has_no_room_and_an_empty_one_nothing() {
    for start in LIMITS {
        let ring = Arc::new(Ring::private(geometry(), start).unwrap());
        let (mut producer, mut consumer) = (Producer::new(ring.clone()), Consumer::new(ring.clone()));
        assert_eq!(consumer.filled(1, 64).unwrap(), None);
        for _ in 0..STEPS {
            assert!(producer.has_room(1).unwrap());
            producer.post(1, 0);
        }
        assert!(!producer.has_room(1).unwrap());
        // Zero bytes are bytes.
        assert_eq!(consumer.filled(1, 64).unwrap(), Some(0));
        consumer.release(1);
        assert!(producer.has_room(1).unwrap());
        // A new producer continues where the ring is.
        let mut second = Producer::new(ring.clone());
        assert_eq!(second.step(), start.wrapping_add(8));
        second.post(1, 64);
        assert_eq!(Consumer::new(ring.clone()).step(), start.wrapping_add(1));
        assert!(!second.has_room(1).unwrap());
    }
}

#[test]
fn both_sides_start_an_operation_at_the_same_step() {
    let ring = Arc::new(Ring::private(geometry(), u64::MAX).unwrap());
    let (mut producer, mut consumer) = (Producer::new(ring.clone()), Consumer::new(ring.clone()));
    producer.post(1, 1);
    assert_eq!(consumer.filled(1, 64).unwrap(), Some(1));
    consumer.release(1);
    // At step 0 of the next lap of the counter; a chunk of 8 moves neither.
    producer.start(8).unwrap();
    consumer.start(8).unwrap();
    producer.post(1, 2);
    assert_eq!(consumer.filled(1, 64).unwrap(), Some(2));
    consumer.release(1);
    // From step 1 to step 8: a slice of 8 fits only because the consumer frees the skipped steps.
    producer.start(8).unwrap();
    assert!(!producer.has_room(8).unwrap());
    consumer.start(8).unwrap();
    assert!(producer.has_room(8).unwrap());
    producer.post(8, 8192);
    assert_eq!(consumer.filled(8, 8192).unwrap(), Some(8192));
    consumer.release(8);
    assert_eq!((producer.step(), consumer.step()), (16, 16));
    // A slice of 2 at an odd step would not be contiguous.
    producer.post(1, 0);
    assert!(producer.has_room(2).unwrap_err().to_string().contains("slot 1"));
    assert!(producer.start(3).is_err() && consumer.start(0).is_err());
}

#[test]
fn invalid_counters_and_sizes_are_errors() {
    let ring = Arc::new(Ring::private(geometry(), 40).unwrap());
    let mut producer = Producer::new(ring.clone());
    let mut consumer = Consumer::new(ring.clone());
    for tail in [49, 24, 0, u64::MAX] {
        ring.words().set_tail(tail);
        let error = consumer.filled(1, 1024).unwrap_err().to_string();
        assert!(error.contains(&format!("tail is {tail}")), "{error}");
    }
    ring.words().set_tail(41);
    for size in [1025, -2, i64::MAX] {
        ring.words().set_size(0, size);
        assert!(consumer.filled(1, 1024).unwrap_err().to_string().contains(&size.to_string()));
    }
    ring.words().set_size(0, EMPTY);
    assert_eq!(consumer.filled(1, 1024).unwrap(), None, "a tail without a size is early");
    (0..8).for_each(|_| producer.post(1, 0));
    for head in [49, 39, 0] {
        ring.words().set_head(head);
        assert!(producer.has_room(1).unwrap_err().to_string().contains(&format!("head is {head}")));
    }
}

#[test]
fn memory_that_cannot_be_a_ring_is_refused() {
    let pages = Pages::new(16384).unwrap();
    let over = |control: usize, data: usize, memory, geometry| {
        // SAFETY: the pages outlive the rings, which do nothing but be made.
        unsafe { Ring::over(pages.ptr(control, 512), pages.ptr(data, 0), geometry, memory, 0) }
    };
    assert!(over(0, 512, Memory::Host, geometry()).is_ok());
    assert!(over(64, 512, Memory::Host, geometry()).is_err());
    assert!(over(0, 520, Memory::Host, geometry()).is_err());
    assert!(over(0, 512, Memory::Device, geometry()).is_err_and(|e| e.to_string().contains("LL slots in device memory")));
    let device = over(0, 512, Memory::Device, Geometry::new([0, 1024, 1024]).unwrap()).unwrap();
    // Flags in device memory are not read.
    assert_eq!(device.missing(Protocol::Ll128, 0, 0, 128), 1);
    // SAFETY: refused before anything is touched.
    assert!(unsafe { device.copy_in(Protocol::Simple, 0, &[1]) }.is_err());
    let host = Ring::private(geometry(), 0).unwrap();
    // SAFETY: as above.
    assert!(unsafe { host.copy_in(Protocol::Simple, 7, &[0; 1025]) }.is_err());
    // SAFETY: NULL is refused.
    assert!(unsafe { Ring::over(std::ptr::null_mut(), pages.ptr(0, 0), geometry(), Memory::Host, 0) }.is_err());
}
