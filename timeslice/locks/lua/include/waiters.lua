-- Waiter records: waiters hash fields `<waiter>/<field>`, queue score, alive deadline.
local WAITER_FIELDS = {
  'job', 'host', 'pid', 'start', 'priority', 'label', 'lease_ms', 'ttl_ms', 'enqueued_at_ms', 'deferred',
  'deferred_at_ms', 'deferred_until_ms', 'world', 'name', -- of a gang
}

local function waiter_get(waiter)
  local names = {}
  for i, field in ipairs(WAITER_FIELDS) do
    names[i] = waiter .. '/' .. field
  end
  local values = redis.call('HMGET', waiters_key, unpack(names))
  local record = {}
  for i, field in ipairs(WAITER_FIELDS) do
    record[field] = values[i] or ''
  end
  return record
end

local function waiter_set(waiter, record)
  local flat = {}
  for _, field in ipairs(WAITER_FIELDS) do
    if record[field] then
      flat[#flat + 1] = waiter .. '/' .. field
      flat[#flat + 1] = record[field]
    end
  end
  redis.call('HSET', waiters_key, unpack(flat))
end

local function waiter_remove(waiter)
  local names = {}
  for i, field in ipairs(WAITER_FIELDS) do
    names[i] = waiter .. '/' .. field
  end
  redis.call('ZREM', queue_key, waiter)
  redis.call('ZREM', alive_key, waiter)
  redis.call('HDEL', waiters_key, unpack(names))
end

local function is_alive(waiter)
  return (tonumber(redis.call('ZSCORE', alive_key, waiter) or 0)) >= now
end

local function has_ended(waiter)
  return redis.call('ZSCORE', ended_key, waiter)
end

-- Of a waiter, or of a request that must not be carried out twice.
local function remember_ended(id)
  redis.call('ZREMRANGEBYSCORE', ended_key, '-inf', now - ENDED_KEEP_MS)
  redis.call('ZREMRANGEBYRANK', ended_key, 0, -ENDED_KEPT)
  redis.call('ZADD', ended_key, now, id)
end

-- A deferral holds until something changed in the group, or its own time is over.
local function is_deferred(record)
  local till = tonumber(record.deferred_until_ms) or 0
  if till <= now or till - now > MAX_PAUSE_MS then
    return false -- over, or the clock moved
  end
  return record.deferred == 'silent' or (tonumber(record.deferred_at_ms) or 0) >= S.changed_ms
end
