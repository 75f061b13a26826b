//! The first seeds of the simulation (`support/src/script/simulation`). `cargo xtask simulate` runs ten thousand, or more.

#![expect(clippy::panic, reason = "a test fails by panicking, in the functions that tests share too")]

use cistern_tests::script::simulation;

/// How many seeds a test runs; libtest runs as many tests at once as there are processors.
const SHARE: u64 = 40;

fn share(from: u64) {
    for seed in from..from + SHARE {
        if let Err(failure) = simulation::run(seed) {
            panic!("{failure}\n`cargo xtask simulate --from {seed} --seeds 1` repeats it");
        }
    }
}

macro_rules! shares {
    ($($name:ident: $number:literal,)*) => {
        $(
            #[test]
            fn $name() {
                share($number * SHARE);
            }
        )*
    };
}

shares! {
    share_0: 0,
    share_1: 1,
    share_2: 2,
    share_3: 3,
    share_4: 4,
    share_5: 5,
    share_6: 6,
    share_7: 7,
}
