//! Results of finished requests, bounded: when it is full the oldest result makes room.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::ids::RequestId;
use crate::request::RequestResult;

pub(super) struct ResultStore {
    limit: usize,
    next: u64,
    by_id: HashMap<RequestId, (u64, Arc<RequestResult>)>,
    /// Order of arrival of what `by_id` holds.
    order: BTreeMap<u64, RequestId>,
    pub(super) dropped: u64,
}

impl ResultStore {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            next: 0,
            by_id: HashMap::new(),
            order: BTreeMap::new(),
            dropped: 0,
        }
    }

    pub(super) fn put(&mut self, result: RequestResult) {
        let id = result.id;
        self.take(id);
        if self.by_id.len() >= self.limit
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.by_id.remove(&oldest);
            self.dropped += 1;
        }
        self.order.insert(self.next, id);
        self.by_id.insert(id, (self.next, Arc::new(result)));
        self.next += 1;
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Arc<RequestResult>> {
        self.by_id.get(&id).map(|(_, result)| result)
    }

    pub(super) fn take(&mut self, id: RequestId) -> Option<Arc<RequestResult>> {
        let (at, result) = self.by_id.remove(&id)?;
        self.order.remove(&at);
        Some(result)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}
