//! A bounded queue that never allocates: frames and requests in flight of the two halves of the wire. Used by the thread that drives the queue pair.

/// At most `N` elements, oldest first.
#[derive(Debug)]
pub struct Ring<T, const N: usize> {
    items: [T; N],
    head: usize,
    len: usize,
}

impl<T: Copy + Default, const N: usize> Default for Ring<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Copy + Default, const N: usize> Ring<T, N> {
    /// An empty one.
    pub fn new() -> Self {
        Ring { items: [T::default(); N], head: 0, len: 0 }
    }

    /// Elements.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no other fits.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == N
    }

    /// The `i`th oldest.
    #[inline]
    pub fn get(&self, i: usize) -> Option<&T> {
        if i < self.len { self.items.get((self.head + i) % N) } else { None }
    }

    /// The oldest.
    #[inline]
    pub fn front(&self) -> Option<&T> {
        self.get(0)
    }

    /// The oldest.
    #[inline]
    pub fn front_mut(&mut self) -> Option<&mut T> {
        if self.len > 0 { self.items.get_mut(self.head) } else { None }
    }

    /// Adds the youngest; false if it does not fit.
    #[inline]
    pub fn push(&mut self, item: T) -> bool {
        if self.is_full() {
            return false;
        }
        if let Some(slot) = self.items.get_mut((self.head + self.len) % N) {
            *slot = item;
        }
        self.len += 1;
        true
    }

    /// Takes the oldest.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        let item = *self.front()?;
        self.head = (self.head + 1) % N;
        self.len -= 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn it_is_a_bounded_queue(ops in proptest::collection::vec(proptest::option::of(1u32..100), 0..200)) {
            let mut ring = Ring::<u32, 5>::new();
            let mut model = VecDeque::new();
            for op in ops {
                match op {
                    Some(value) => {
                        prop_assert_eq!(ring.push(value), model.len() < 5);
                        if model.len() < 5 {
                            model.push_back(value);
                        }
                    }
                    None => prop_assert_eq!(ring.pop(), model.pop_front()),
                }
                prop_assert_eq!((ring.len(), ring.is_empty(), ring.is_full()), (model.len(), model.is_empty(), model.len() == 5));
                prop_assert_eq!(ring.front(), model.front());
                prop_assert!((0..6).all(|i| ring.get(i) == model.get(i)));
            }
        }
    }
}
