//! Any bytes to what reads the control messages that ranks send each other: what is read is written as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use railhead::mesh::fuzzed::Control;

fuzz_target!(|bytes: &[u8]| {
    // Shorter ones have zeros behind them, as most messages do.
    let mut message = [0; 64];
    message.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
    if let Ok(control) = Control::decode(&message) {
        assert_eq!(control.encode(), message, "{control:?}");
    }
});
