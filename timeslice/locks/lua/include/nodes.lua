-- Nodes that leave the group, and nodes that operators drain. Needs group, residency.

-- What the group notes of a node: its jobs -> state there, and the fields of it all.
local function node_record(node)
  local jobs, fields = {}, {}
  local flat = redis.call('HGETALL', members_key)
  for i = 1, #flat, 2 do
    local owner, job, name = string.match(flat[i], '^([^/]+)/([^/]+)/(.*)$')
    if owner == node then
      fields[#fields + 1] = flat[i]
      if job ~= '@' then
        jobs[job] = name == 'state' and flat[i + 1] or jobs[job] or ''
      end
    end
  end
  return jobs, fields
end

-- Nodes that operators drain stand in S.drains as 'node <name> by <who>; ...'.
local function is_drained(node)
  return string.find('; ' .. S.drains, '; node ' .. node .. ' by ', 1, true) ~= nil
end

local function undrain(node)
  local kept = {}
  for name, by in string.gmatch(S.drains, 'node (%S+) by ([^;]*)') do
    if name ~= node then
      kept[#kept + 1] = 'node ' .. name .. ' by ' .. by
    end
  end
  set('drains', table.concat(kept, '; '))
end

-- Takes a node out of the group, with all that is noted of it.
local function node_remove(node, by, why, lost)
  local jobs, fields = node_record(node)
  hear(node)
  if is_drained(node) then
    undrain(node)
  end
  redis.call('ZREM', nodes_key, node)
  for _, field in ipairs(fields) do
    redis.call('HDEL', members_key, field)
  end
  for _, field in ipairs(redis.call('HKEYS', targets_key)) do
    if string.match(field, '^[^/]+/([^/]+)/') == node then
      redis.call('HDEL', targets_key, field)
    end
  end
  for job in pairs(jobs) do
    if job ~= S.job then
      job_recompute(job)
    end
  end
  emit('NodeLeft', 'node', node, 'by', by, 'reason', why, 'lost', lost)
  set('changed_ms', now)
  wake('members')
end
