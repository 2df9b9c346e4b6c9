//! Cases: a format and a machine on which generic tests run, for programs that have a trait `Case`.

/// Makes a type that implements the trait `Case` of this program; `$set` is called on the machine.
macro_rules! case {
    ($(#[$meta:meta])* $name:ident: $F:ty, $A:ty;
        $format:expr, $arch:expr $(, .$set:ident($($to:expr)?))* $(; $($more:tt)*)?
    ) => {
        $(#[$meta])*
        pub struct $name;

        $(#[$meta])*
        impl Case for $name {
            type F = $F;
            type A = $A;
            $($($more)*)?

            fn format() -> $F {
                $format
            }

            fn machine(cpus: usize) -> Machine<$A> {
                Machine::new($arch, cpus)$(.$set($($to)?))*
            }
        }
    };
}

/// Makes a test of `$run` for each of these cases.
#[macro_export]
macro_rules! on_cases {
    ($run:ident: $($name:ident $C:ident),*) => {$(
        #[test]
        fn $name() {
            $run::<$C>();
        }
    )*};
}
