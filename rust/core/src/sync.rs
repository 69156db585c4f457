//! The locks of the core and of its workers: `parking_lot` in production, loom's models under
//! `cfg(loom)`. Public for the crates of this workspace only.

#[cfg(loom)]
pub use self::model::{Condvar, Mutex};
#[cfg(not(loom))]
pub use self::real::{Condvar, Mutex};

#[cfg(not(loom))]
mod real {
    use std::time::Duration;

    pub use parking_lot::Mutex;
    use parking_lot::MutexGuard;

    /// Condition variable.
    #[derive(Default)]
    pub struct Condvar(parking_lot::Condvar);

    impl Condvar {
        /// Waits for a notification, at most `timeout`. Spurious returns are possible.
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
            self.0.wait_for(guard, timeout);
        }

        /// Wakes every waiter.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

#[cfg(loom)]
mod model {
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    /// Mutual exclusion.
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    /// Access to what a [`Mutex`] guards.
    pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        /// An open lock.
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        /// Waits for the lock.
        #[expect(clippy::unwrap_used, reason = "a poisoned lock ends the model run")]
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        #[expect(clippy::unwrap_used, reason = "empty only inside wait_for")]
        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        #[expect(clippy::unwrap_used, reason = "empty only inside wait_for")]
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    /// Condition variable.
    pub struct Condvar(loom::sync::Condvar);

    impl Default for Condvar {
        fn default() -> Self {
            Self(loom::sync::Condvar::new())
        }
    }

    impl Condvar {
        /// Loom has no time: a wait ends by a notification only, so a lost wake-up is a deadlock
        /// that the model reports.
        #[expect(clippy::unwrap_used, reason = "a poisoned lock ends the model run")]
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _timeout: Duration) {
            let inner = guard.0.take().unwrap();
            guard.0 = Some(self.0.wait(inner).unwrap());
        }

        /// Wakes every waiter.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
